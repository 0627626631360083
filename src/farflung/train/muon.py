"""Muon for the matrices inside a model, AdamW for the rest: the inner optimizer of MuLoCo (arXiv 2505.23725)."""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from farflung.core.vectors import describe
from farflung.train.base import Task, TaskConfig
from farflung.train.text_task import BETAS, PEAK_LR, WEIGHT_DECAY, text_task
from farflung.train.vision_task import VISION_LR, vision_task

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic with the steepest slope at zero (K. Jordan, kellerjordan.github.io/posts/muon)."""

NUM_STEPS = 5
RMS = 0.2  # of an update, in lr: near AdamW's, so that its peak learning rates fit (arXiv 2502.16982)


class Muon(torch.optim.Optimizer):
    """Steps matrices along their orthogonalised momentum, other parameters by AdamW.

    A matrix ``[A, B]`` with gradient G, in the order of ``torch.optim.Muon`` with ``match_rms_adamw``:

        M <- mu M + (1 - mu) G;   O = orthogonal((1 - mu) G + mu M)
        W <- (1 - lr wd) W - lr 0.2 sqrt(max(A, B)) O

    A convolution's kernel is a matrix with a row for each channel that it makes. Products are fp32, not bf16, and
    it works with the versions of PyTorch that have no Muon.

    Args:
        groups: parameter groups, each with ``orthogonal``: whether its members are matrices to step this way.
        lr: peak learning rate.
        momentum: mu.
        betas, eps: AdamW's.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = BETAS,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(
            groups, {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": 0.0}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    (_muon if group["orthogonal"] else _adamw)(p, p.grad, self.state[p], group)


def _muon(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        state["momentum"] = torch.zeros_like(p)
    m, mu = state["momentum"], group["momentum"]
    m.lerp_(grad, 1 - mu)
    matrix_AB = grad.lerp(m, mu).flatten(1)
    size = RMS * max(matrix_AB.shape) ** 0.5
    p.add_(orthogonal(matrix_AB).view_as(p), alpha=-group["lr"] * size)


def _adamw(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    state["step"] += 1
    beta1, beta2 = group["betas"]
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    bias1, bias2 = (1 - beta ** state["step"] for beta in (beta1, beta2))
    size = (state["exp_avg_sq"] / bias2).sqrt_().add_(group["eps"])
    p.addcdiv_(state["exp_avg"], size, value=-group["lr"] / bias1)


def orthogonal(matrix_AB: Tensor) -> Tensor:
    """About ``U V^T`` of ``U S V^T``: singular values come near 1, between 0.6 and 1.2, by Newton-Schulz steps.

    >>> torch.linalg.svdvals(orthogonal(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))).round()
    tensor([1., 1.])
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrix_AB.shape[0] > matrix_AB.shape[1]
    x = matrix_AB.T if tall else matrix_AB
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(NUM_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    found: Tensor = x.T if tall else x
    return found


def muon(model: nn.Module, lr: float) -> Muon:
    """Muon for matrices and kernels, but not embeddings, tied ones included; AdamW for these and for vectors."""
    inside = {s.name for s in describe(model) if len(s.shape) >= 2 and not s.embedding}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    tables = [p for name, p in trained if p.dim() >= 2 and name not in inside]
    groups = [
        {"params": [p for n, p in trained if n in inside], "orthogonal": True, "weight_decay": WEIGHT_DECAY},
        {"params": tables, "orthogonal": False, "weight_decay": WEIGHT_DECAY},
        {"params": [p for _, p in trained if p.dim() < 2], "orthogonal": False},
    ]
    return Muon([group for group in groups if group["params"]], lr=lr)


def text_muon(config: TaskConfig) -> Task:
    """The text task with Muon inside, at AdamW's peak learning rates."""
    lr = config.lr or PEAK_LR[config.scale]
    return replace(text_task(config), name="text_muon", build_optimizer=functools.partial(muon, lr=lr))


def vision_muon(config: TaskConfig) -> Task:
    """The vision task with Muon inside, at AdamW's peak learning rates."""
    lr = config.lr or VISION_LR[config.scale]
    return replace(vision_task(config), name="vision_muon", build_optimizer=functools.partial(muon, lr=lr))
