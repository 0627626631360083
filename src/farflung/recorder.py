"""A machine and its tape: every event before the actions that it caused."""

import errno
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


MAX_WAITING_BYTES = 64 << 20  # of a tape that cannot be written; then it ends there, and is still a tape


class PatientFile:
    """A text file whose disk may be full for a while: what cannot be written waits in memory, in order.

    Attributes:
        failed_writes: how often there was no room.
        ended: too much was waiting; nothing more is kept.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._waiting = bytearray()
        self.full = False  # pretend that there is no room
        self.failed_writes, self.ended = 0, False

    def write(self, text: str) -> None:
        if not self.ended:
            self._waiting += text.encode()

    def flush(self) -> None:
        """Write what is waiting, or as much as there is room for."""
        try:
            while self._waiting:
                if self.full:
                    raise OSError(errno.ENOSPC, "no space left on device")
                del self._waiting[: self._file.write(self._waiting)]
        except OSError:
            self.failed_writes += 1
            self.ended = self.ended or len(self._waiting) > MAX_WAITING_BYTES

    def close(self) -> None:
        self.flush()
        self._file.close()


class Recorder:
    """Feeds a machine and writes its segment; `path` None keeps no tape. A full disk does not stop the machine.

    Args:
        machine: gets the events.
        node: its name on the tape.
        clock: seconds since the run's start, the same for every node of a machine (monotonic).
    """

    def __init__(
        self, machine: Machine[Any, Any], node: str, clock: Callable[[], float], path: Path | None
    ) -> None:
        self.machine, self.clock = machine, clock
        self._file: PatientFile | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = PatientFile(path)
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

    def fill_disk(self, full: bool) -> None:
        """Pretend that there is no room for the tape, or that there is again."""
        if self._file is not None:
            self._file.full = full

    @property
    def failed_writes(self) -> int:
        return 0 if self._file is None else self._file.failed_writes

    def close(self) -> None:
        if self._file is not None:
            self._file.full = False
            self._file.close()


_encoder = msgspec.json.Encoder()


def _json(item: msgspec.Struct) -> str:
    return _encoder.encode(item).decode()
