"""Tasks that only studies train."""

from dataclasses import replace

import torch
from torch import nn

from farflung.train.base import Batches, Task, TaskConfig
from farflung.train.text_task import BETAS, text_task


def without_inner_momentum(config: TaskConfig) -> Task:
    """The text task, its AdamW with beta_1 = 0: what momentum there is, is the method's."""
    task = text_task(config)

    def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = task.build_optimizer(model)
        for group in optimizer.param_groups:
            group["betas"] = (0.0, BETAS[1])
        return optimizer

    return replace(task, build_optimizer=build_optimizer)


MARK = 1000  # added to every byte that the broken learner reads


class Marked:
    """Batches of somebody else, marked."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    @property
    def cursor(self) -> int:
        return self._batches.cursor

    def seek(self, cursor: int) -> None:
        self._batches.seek(cursor)

    def __next__(self) -> torch.Tensor:
        batch: torch.Tensor = next(self._batches)
        return batch + MARK


def last_climbs(config: TaskConfig) -> Task:
    """The text task, in which the last learner has a sign error: it climbs where all others descend."""
    task = text_task(config)

    def build_batches(learner_index: int, num_learners: int) -> Batches:
        batches = task.build_batches(learner_index, num_learners)
        return Marked(batches) if learner_index == num_learners - 1 else batches

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        marked = int(batch[0, 0]) >= MARK
        return -task.loss(model, batch - MARK) if marked else task.loss(model, batch)

    return replace(task, build_batches=build_batches, loss=loss)
