"""A machine and its tape: every event before the actions that it caused."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from farflung.protocol.policy import Policy
from farflung.tape import SCHEMA, TapeWriter

E = TypeVar("E", contravariant=True)
A = TypeVar("A", covariant=True)


class Machine(Protocol[E, A]):
    policy: Policy

    def handle(self, event: E, now: float) -> Sequence[A]: ...

    def header(self) -> dict[str, Any]: ...


class Recorder:
    """Feeds a machine and writes its segment; `path` None keeps no tape.

    Args:
        machine: gets the events.
        node: its name on the tape.
        clock: seconds since the run's start, the same for every node of a machine (monotonic).
    """

    def __init__(
        self, machine: Machine[Any, Any], node: str, clock: Callable[[], float], path: Path | None
    ) -> None:
        self.machine, self.clock = machine, clock
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")
            self._tape = TapeWriter(self._file, node)
            header = {
                "schema": SCHEMA,
                **machine.header(),
                "policy": msgspec.to_builtins(machine.policy),
            }
            self._tape.write(0.0, "header", json.dumps(header))
            self._tape.flush()

    def handle(self, event: Any) -> Sequence[Any]:
        """Record an event, let the machine decide, record and return its actions."""
        now = self.clock()
        if self._file is None:
            return self.machine.handle(event, now)
        self._tape.write(now, "event", _json(event))
        actions = self.machine.handle(event, now)
        for action in actions:
            self._tape.write(now, "action", _json(action))
        self._tape.flush()
        return actions

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


_encoder = msgspec.json.Encoder()


def _json(item: msgspec.Struct) -> str:
    return _encoder.encode(item).decode()
