"""A task of your own for every command: run, lab, compare, chaos, plan --check.

    cd examples
    farflung run --set task=own_task:spirals --set num_learners=3 --set steps=600 --set scale=wide

Two interleaved spirals are to be told apart; a "token" is one point of the plane. docs/add-a-task.md says what
each field of a Task is for.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from farflung.errors import UserError
from farflung.train.batches import ShardBatches
from farflung.train.task import Task, TaskConfig

WIDTHS = {"narrow": 16, "wide": 64}  # what `scale` means here
NUM_POINTS, NUM_HELD_OUT = 60_000, 2_000


def points(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on two spirals, and which of the two each lies on; equal arguments give equal bits."""
    generator = torch.Generator().manual_seed(first)
    label = torch.randint(2, (count,), generator=generator)
    turn = torch.rand(count, generator=generator)
    angle = 3 * math.pi * turn + math.pi * label
    where = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1)
    return where + 0.01 * torch.randn(count, 2, generator=generator), label


def spirals(config: TaskConfig) -> Task:
    """What ``task = "own_task:spirals"`` names: a function from the recipe's values to a Task."""
    width = WIDTHS.get(config.scale)
    if width is None:
        raise UserError(f"scale = {config.scale!r}: this task knows {', '.join(WIDTHS)}")
    held_out = points(0, NUM_HELD_OUT)

    def build_model() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            return nn.Sequential(
                nn.Linear(2, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 2)
            )

    def build_batches(learner_index: int, num_learners: int) -> ShardBatches:
        where, label = points(1 + learner_index, NUM_POINTS // num_learners)
        return ShardBatches(
            lambda at: (where[at], label[at]), len(label), config.batch_size, config.seed, learner_index
        )

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        where, label = batch
        return F.cross_entropy(model(where), label)

    @torch.no_grad()
    def measure(model: nn.Module) -> dict[str, float]:
        where, label = held_out
        guess = model(where)
        right = (guess.argmax(1) == label).float().mean()
        return {"loss": F.cross_entropy(guess, label).item(), "accuracy": right.item()}

    return Task(
        name="spirals",
        build_model=build_model,
        build_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=config.lr or 1e-2),
        build_batches=build_batches,
        loss=loss,
        num_tokens=lambda batch: len(batch[1]),
        evaluate=lambda model: measure(model)["loss"],
        measure=measure,
        lr_multiplier=lambda own_steps, progress: min(1.0, (own_steps + 1) / config.warmup_steps),
    )
