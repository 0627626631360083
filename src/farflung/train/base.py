"""What the rest of the library may ask of a task: model, optimizer, data, loss, schedule."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from farflung.errors import UserError


class Batches(Protocol):
    """An endless, resumable source of batches."""

    @property
    def cursor(self) -> int:
        """The data position, an integer that a hub can store and hand back."""
        ...

    def seek(self, cursor: int) -> None:
        """Continue from a position that ``cursor`` gave, exactly."""
        ...

    def __next__(self) -> Any:
        """Return the next batch and advance the cursor."""
        ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """One thing to train. All functions are deterministic: equal arguments give equal bits.

    Args:
        name: shown in logs and reports.
        build_model: a fresh model, the same bits each time.
        build_optimizer: the inner optimizer of a model; the learning rates it sets are the peaks.
        build_batches: ``(learner_index, num_learners) -> Batches``, that learner's own part of the data.
        loss: ``(model, batch) -> Tensor``, the mean loss of a batch (nats per token), with its graph.
        num_tokens: tokens trained on by a batch.
        evaluate: held-out loss (nats per token); leaves train or eval mode as it was, builds no graph.
        measure: all held-out figures by name, in one pass: ``loss``, as `evaluate` gives it, and others such as
            accuracy; None: the loss is all there is.
        lr_multiplier: ``(own_steps, progress) -> float``; own_steps counts this learner's finished steps,
            progress in 0..1 is the share of the whole run's token budget that is spent.
        clip_norm: largest gradient norm, or None for no clipping.
    """

    name: str
    build_model: Callable[[], nn.Module]
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    build_batches: Callable[[int, int], Batches]
    loss: Callable[[nn.Module, Any], Tensor]
    num_tokens: Callable[[Any], int]
    evaluate: Callable[[nn.Module], float]
    lr_multiplier: Callable[[int, float], float]
    measure: Callable[[nn.Module], dict[str, float]] | None = None
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(
                f"Task.clip_norm = {self.clip_norm}: give a norm above 0, or None for no clipping"
            )

    def evaluation(self, model: nn.Module) -> dict[str, Any]:
        """What an evaluation's record says of a model: ``loss``, and ``figures`` by name if there are others."""
        if self.measure is None:
            return {"loss": self.evaluate(model)}
        figures = dict(self.measure(model))
        return {"loss": figures.pop("loss"), "figures": figures}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the data comes from; None is the task's default.

    ``path`` is a text file or a directory of texts (default: Shakespeare's plays); of ``vision`` it is a folder
    with the four files of MNIST or a relative (default: Fashion-MNIST).
    """

    path: str | None = None


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What a recipe says about its task.

    Args:
        seed: of the initial weights and of the order of the data.
        scale: size of the model, a name in ``farflung.train.gpt.SCALES`` or ``vision_models.VISION_SCALES``, or
            what a task of your own defines.
        batch_size: windows or images in a batch of one learner.
        lr: peak learning rate; None takes the task's choice for the scale.
        warmup_steps: of each learner's own steps.
        eval_batches: batches in one evaluation.
        data: where the data comes from.
    """

    seed: int = 0
    scale: str = "tiny"
    batch_size: int = 16
    lr: float | None = None
    warmup_steps: int = 60
    eval_batches: int = 20
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self) -> None:
        for name, least in (("seed", 0), ("batch_size", 1), ("warmup_steps", 0), ("eval_batches", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise UserError(f"{name} = {value!r}: give a whole number of at least {least}")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise UserError(f"lr = {self.lr!r}: give a peak learning rate above 0, or leave it out")
