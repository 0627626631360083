"""An island's trainer behind its mailbox: commands in, reports out. Here in this process, or in a worker."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from farflung.engine.own_state import Own
from farflung.engine.trainer import Trainer
from farflung.protocol import mailbox as box
from farflung.protocol.own_state import MISSING, OwnState

Step = Callable[[float], tuple[int, float]]
"""One inner step at a share of the budget -> (tokens, loss)."""


class Body(Protocol):
    """What a virtual island needs of its trainer.

    A step is begun and ended at different virtual moments; what is computed between is nobody's business, so it
    may be computed elsewhere meanwhile. Commands taken during a step are executed at its end.
    """

    layout: str
    fingerprint: str

    @property
    def own(self) -> OwnState:
        """What lies on the learner's disk of the method's own state."""

    def inherit(self, old: Any) -> None:
        """Find what the learner's former process, a body of the same kind, left on the disk."""

    def take(self, command: box.AnyCommand) -> None: ...

    def begin(self) -> None:
        """A step begins."""

    def end(self, step_s: float) -> list[box.AnyReport]:
        """The step has ended: the boundary, and what it reports."""

    def idle(self) -> list[box.AnyReport]:
        """Look at the mailbox at the boundary where the trainer stands."""

    def may_step(self) -> bool: ...

    def read(self, fragment: int, seed: bool) -> bytes:
        """The fragment's uplink slot, or (seed) its downlink slot."""

    def write(self, fragment: int, value: memoryview) -> None:
        """Put a version, or what leads to it, into the fragment's downlink slot."""

    def get_state(self) -> bytes:
        """The state slot."""

    def put_state(self, state: bytes) -> None: ...

    def close(self) -> None: ...


class Slots:
    """The byte vectors that trainer and sidecar share, one a fragment, made when first asked for."""

    def __init__(self, size_bytes: Callable[[int], int]) -> None:
        self._size_bytes = size_bytes
        self._slots: dict[int, Tensor] = {}

    def __call__(self, fragment: int) -> Tensor:
        if fragment not in self._slots:
            self._slots[fragment] = torch.zeros(self._size_bytes(fragment), dtype=torch.uint8)
        return self._slots[fragment]


class StateSlot:
    """Where inner state lies on its way from or to a donor."""

    def __init__(self) -> None:
        self.content = b""

    def put(self, state: bytes) -> None:
        self.content = state

    def get(self) -> bytes:
        return self.content


class LocalBody:
    """A trainer in this process.

    Args:
        trainer: the real one.
        step: the inner step.
        uplink, downlink, state: the slots that the trainer was given.
    """

    def __init__(
        self, trainer: Trainer, step: Step, uplink: Slots, downlink: Slots, state: StateSlot
    ) -> None:
        self.trainer, self._step = trainer, step
        self.uplink, self.downlink, self.state = uplink, downlink, state
        plan = trainer.island.plan
        self.layout, self.fingerprint = plan.to_json(), plan.fingerprint()
        self._commands: list[box.AnyCommand] = []
        self._progress = (0, 0.0)  # tokens and share when the step began
        self._computed: tuple[int, float] | None = None
        self.disk: Own | None = None
        trainer.keep = self._keep

    @property
    def own(self) -> OwnState:
        return self.disk.about if self.disk is not None else OwnState(problem=MISSING)

    def _keep(self, own: Own) -> None:
        self.disk = Own(about=own.about, tensors={name: t.clone() for name, t in own.tensors.items()})

    def inherit(self, old: "LocalBody") -> None:
        self.disk = self.trainer.found = old.disk

    def take(self, command: box.AnyCommand) -> None:
        self._commands.append(command)

    def begin(self) -> None:
        progress = self.trainer.progress
        self._progress = (progress.tokens, progress.fraction)

    def begin_at(self, tokens: int, budget_tokens: int) -> None:
        """Begin a step whose schedule sees these tokens of the run."""
        self._progress = (tokens, min(1.0, tokens / budget_tokens))

    def compute(self) -> None:
        """Compute the step that was begun; `end` does it otherwise."""
        self._computed = self._step(self._progress[1])

    def end(self, step_s: float) -> list[box.AnyReport]:
        if self._computed is None:
            self.compute()
        assert self._computed is not None
        (num_tokens, loss), self._computed = self._computed, None
        self._drain()
        self.trainer.stepped(num_tokens, step_s=step_s, loss=loss, progress_tokens=self._progress[0])
        return self._reports()

    def idle(self) -> list[box.AnyReport]:
        self._drain()
        self.trainer.idle()
        return self._reports()

    def may_step(self) -> bool:
        return self.trainer.may_step()[0]

    def read(self, fragment: int, seed: bool) -> bytes:
        return bytes((self.downlink if seed else self.uplink)(fragment).numpy())

    def write(self, fragment: int, value: memoryview) -> None:
        self.downlink(fragment)[: len(value)].copy_(torch.frombuffer(bytearray(value), dtype=torch.uint8))

    def get_state(self) -> bytes:
        return self.state.get()

    def put_state(self, state: bytes) -> None:
        self.state.put(state)

    def close(self) -> None:
        pass

    def _drain(self) -> None:
        commands, self._commands = self._commands, []
        for command in commands:
            self.trainer.take(command)

    def _reports(self) -> list[box.AnyReport]:
        reports, self.trainer.reports = self.trainer.reports, []
        return reports
