"""The inner loop: one step of plain training, and everything it takes to continue one exactly."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from farflung.train.base import Batches, Task
from farflung.train.state import Extra, PackedState, pack_optimizer, unpack_optimizer

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: spreads neighbouring seeds


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one step did: mean loss (nats per token), tokens trained on, learning rate of the first group."""

    loss: float
    num_tokens: int
    lr: float


class InnerLoop:
    """Trains a model on a task, one step per call, and knows nothing of other learners.

    The peak learning rate of each group is what the optimizer had when it came here (``initial_lr``).

    Args:
        task: loss, schedule and clipping.
        model: trained in place, in whatever mode (train or eval) it is in.
        optimizer: of this model's parameters.
        batches: this learner's data; its cursor is part of the state.
        rng_seed: makes random layers (dropout) a function of (rng_seed, cursor), so that they resume exactly
            and the global random state stays untouched; give each learner its own. None leaves them to the
            global random state, which no state here holds.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Batches,
        *,
        rng_seed: int | None = None,
    ) -> None:
        self.task = task
        self.model = model
        self.optimizer = optimizer
        self.batches = batches
        self.own_steps = 0
        self._rng_seed = rng_seed
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))

    def step(self, progress: float) -> StepResult:
        """Take one step; ``progress`` in 0..1 is the share of the run's token budget that is spent."""
        lr = self.set_lr(progress)
        loss, num_tokens = self.backward()
        self.update()
        return StepResult(loss=loss.item(), num_tokens=num_tokens, lr=lr)

    def set_lr(self, progress: float) -> float:
        """Set the learning rates of the step that is to be taken; returns that of the first group."""
        multiplier = self.task.lr_multiplier(self.own_steps, progress)
        for group in self.optimizer.param_groups:
            lr = group["initial_lr"] * multiplier
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        return float(self.optimizer.param_groups[0]["lr"])

    def backward(self) -> tuple[Tensor, int]:
        """Add the next batch's gradients to those that are there; returns its loss and tokens."""
        cursor = self.batches.cursor
        batch = next(self.batches)
        return self._backward(batch, cursor), self.task.num_tokens(batch)

    def update(self) -> None:
        """Clip, take the optimizer's step, and forget the gradients."""
        if self.task.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.own_steps += 1

    def _backward(self, batch: Any, cursor: int) -> Tensor:
        if self._rng_seed is None:
            return self._loss_and_gradients(batch)
        seed = (self._rng_seed * _GOLDEN + cursor) % 2**63
        cuda = sorted({p.device.index for p in self.model.parameters() if p.is_cuda})
        with torch.random.fork_rng(devices=cuda):
            torch.default_generator.manual_seed(seed)
            for index in cuda:
                torch.cuda.default_generators[index].manual_seed(seed)
            return self._loss_and_gradients(batch)

    def _loss_and_gradients(self, batch: Any) -> Tensor:
        loss = self.task.loss(self.model, batch)
        torch.autograd.backward(loss)
        return loss.detach()

    def state_dict(self) -> PackedState:
        """Return all that continues this loop exactly, next to the model: optimizer, own steps, data cursor.

        Tensors are references (see ``pack_optimizer``); ``state_bytes`` makes them bytes.
        """
        return self._pack({"own_steps": self.own_steps, "cursor": self.batches.cursor})

    def donor_state(self) -> PackedState:
        """Return what another learner may take over: the state without the data cursor, which is its owner's.

        Learners that share it have equal bytes and so equal digests, wherever they are in their data.
        """
        return self._pack({"own_steps": self.own_steps})

    def load_state_dict(self, packed: PackedState) -> None:
        """Continue from a state; a donor's state leaves the data cursor where it is."""
        extra = unpack_optimizer(self.model, self.optimizer, packed)
        self.own_steps = int(extra["own_steps"])
        if "cursor" in extra:
            self.batches.seek(int(extra["cursor"]))

    def _pack(self, extra: Extra) -> PackedState:
        return pack_optimizer(self.model, self.optimizer, extra)
