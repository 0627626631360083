"""The inner loop's state of any model and optimizer: what a donor gives and what a save file keeps."""

import json
from typing import Any

import torch
from torch import nn

from farflung.train.state import digest, load_state_bytes, pack_optimizer, state_bytes, unpack_optimizer


class ModelInner:
    """Optimizer state by parameter name, stateful objects, and the data position (an `engine.trainer.Inner`).

    Args:
        model, optimizer: whose state it is.
        data: has ``cursor`` and ``seek``; None counts steps instead.
        stateful: objects whose ``state_dict`` is JSON-able.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, stateful: dict[str, Any]
    ) -> None:
        self.model, self.optimizer, self.data, self.stateful = model, optimizer, data, stateful
        self._cursor = 0

    @property
    def cursor(self) -> int:
        return int(self.data.cursor) if self.data is not None else self._cursor

    @cursor.setter
    def cursor(self, cursor: int) -> None:
        if self.data is not None:
            self.data.seek(cursor)
        self._cursor = cursor

    def count_step(self) -> None:
        self._cursor += 1

    def donate(self) -> bytes:
        states = {name: one.state_dict() for name, one in self.stateful.items()}
        extra: dict[str, int | float | str] = {"stateful": json.dumps(states, sort_keys=True)}
        return state_bytes(pack_optimizer(self.model, self.optimizer, extra))

    def receive(self, state: bytes) -> None:
        extra = unpack_optimizer(self.model, self.optimizer, load_state_bytes(state))
        states = json.loads(str(extra["stateful"]))
        for name, one in self.stateful.items():
            one.load_state_dict(states[name])

    def digest(self, state: bytes) -> str:
        return digest(state)

    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])
