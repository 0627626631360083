"""Tasks that only studies train."""

from dataclasses import replace

import torch
from torch import nn

from farflung.train.base import Task, TaskConfig
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
