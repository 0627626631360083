"""A model whose training can be followed with a pencil: every parameter is pulled towards one number."""

import struct

import torch
import xxhash
from torch import Tensor, nn


def quadratic_model(seed: int = 0) -> nn.Module:
    """Four small matrices: enough to be cut into fragments."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Module()
    for index in range(4):
        model.register_parameter(f"w{index}", nn.Parameter(torch.randn(4, 3, generator=generator)))
    return model


class QuadraticInner:
    """Plain SGD on ``||w - target||^2 / 2``: ``w <- w - lr (w - target)``, lr falling with the steps done.

    The step counter is the inner-optimizer state that a donor hands over; the cursor is one's own.

    Args:
        model: its parameters are trained in place.
        target: where they are pulled.
        lr: learning rate of the first step.
    """

    def __init__(self, model: nn.Module, target: float, lr: float = 0.1):
        self.model, self.target, self.first_lr = model, target, lr
        self.steps = 0
        self.cursor = 0

    def step(self) -> float:
        """One step over one batch; returns the loss."""
        self.steps += 1
        self.cursor += 1
        loss = 0.0
        with torch.no_grad():
            for parameter in self.model.parameters():
                loss += float(((parameter - self.target) ** 2).sum()) / 2
                pull_(parameter, self.target, self.lr())
        return loss

    def donate(self) -> bytes:
        return struct.pack("<q", self.steps)

    def receive(self, state: bytes) -> None:
        (self.steps,) = struct.unpack("<q", state)

    def digest(self, state: bytes) -> str:
        return xxhash.xxh3_128_hexdigest(state)

    def lr(self) -> float:
        return lr_after(self.steps, self.first_lr)


def lr_after(steps: int, first_lr: float = 0.1) -> float:
    """Learning rate of step number `steps` (1, 2, ...)."""
    return first_lr / (1 + steps / 100)


def pull_(parameter: Tensor, target: float, lr: float) -> None:
    """``w <- w - lr (w - target)`` in place."""
    parameter -= lr * (parameter - target)
