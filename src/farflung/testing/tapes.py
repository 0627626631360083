"""A tape in memory: record what machines see and do, tell it as a story, replay it through fresh machines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from farflung.protocol.actions import LearnerAction, SyncerAction
from farflung.protocol.events import LearnerEvent, SyncerEvent
from farflung.protocol.learner import LearnerMachine
from farflung.protocol.syncer import SyncerMachine
from farflung.tape import Record


class MemoryTape:
    """The records of several machines, in the order in which they happened."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._sequences: dict[str, int] = {}

    def open(self, node: str, machine: Any) -> None:
        """A machine begins; memory needs no header."""

    def handle(self, node: str, machine: Any, event: msgspec.Struct, now: float) -> Sequence[Any]:
        """Let a machine take an event, record it with the actions, and check the machine."""
        actions: Sequence[Any] = machine.handle(event, now)
        self.write(now, node, event, actions)
        machine.validate()
        return actions

    def write(self, now: float, node: str, event: msgspec.Struct, actions: Sequence[msgspec.Struct]) -> None:
        """An event, then the actions that it caused."""
        self._append(now, node, "event", event)
        for action in actions:
            self._append(now, node, "action", action)

    def _append(self, now: float, node: str, kind: str, item: msgspec.Struct) -> None:
        sequence = self._sequences[node] = self._sequences.get(node, -1) + 1
        self.records.append(Record(now, node, sequence, kind, msgspec.to_builtins(item)))

    def nodes(self) -> list[str]:
        return sorted(self._sequences)

    def of(self, node: str) -> list[Record]:
        return [r for r in self.records if r.node == node]

    def notes(self, kind: str) -> list[dict[str, Any]]:
        """The data of every `Note` of this kind."""
        return [r.data["data"] for r in self.records if r.type == "Note" and r.data["kind"] == kind]

    def story(self, last: int = 60) -> str:
        """The end of the tape, one line a record: what a failing assertion should print."""
        return "\n" + "\n".join(
            f"{r.t:9.3f} {r.node:14} {'  ' if r.kind == 'action' else ''}{r.data}"
            for r in self.records[-last:]
        )


@dataclass(frozen=True)
class Divergence:
    """The first event whose replay caused other actions than the tape holds."""

    record: Record
    taped: list[str]
    replayed: list[str]

    def __str__(self) -> str:
        at = f"{self.record.node} seq {self.record.seq}, {self.record.type} at {self.record.t} s"
        return f"{at}\n  taped:    {self.taped}\n  replayed: {self.replayed}"


def replay(records: Iterable[Record], machine: SyncerMachine | LearnerMachine) -> Divergence | None:
    """Feed one machine's taped events to a fresh machine; None if every action is the taped one.

    Args:
        records: of one machine and incarnation, in order; headers are skipped.
        machine: made from the same policy and header as the one that wrote the tape.
    """
    groups: list[tuple[Record, list[str]]] = []
    for record in records:
        if record.kind == "event":
            groups.append((record, []))
        elif record.kind == "action":
            groups[-1][1].append(_text(record.data))
    for record, taped in groups:
        replayed = [_text(msgspec.to_builtins(action)) for action in _handle(machine, record)]
        if taped != replayed:
            return Divergence(record, taped, replayed)
    return None


def _handle(
    machine: SyncerMachine | LearnerMachine, record: Record
) -> Sequence[SyncerAction] | Sequence[LearnerAction]:
    if isinstance(machine, SyncerMachine):
        event: SyncerEvent = msgspec.convert(record.data, SyncerEvent)
        return machine.handle(event, record.t)
    heard: LearnerEvent = msgspec.convert(record.data, LearnerEvent)
    return machine.handle(heard, record.t)


def _text(data: Any) -> str:
    """Comparable whatever the order of keys; not-a-number is null, as on a real tape."""
    return msgspec.json.encode(data, order="sorted").decode()
