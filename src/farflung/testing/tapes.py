"""A tape in memory: record what machines see and do, tell it as a story, replay it through fresh machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from farflung import tape
from farflung.errors import UserError
from farflung.protocol import snapshot
from farflung.protocol.actions import LearnerAction, SyncerAction
from farflung.protocol.events import LearnerEvent, SyncerEvent
from farflung.protocol.learner import LearnerMachine
from farflung.protocol.policy import Policy
from farflung.protocol.syncer import SyncerMachine
from farflung.tape import Record


class MemoryTape:
    """The records of several machines, in the order in which they happened.

    Attributes:
        watch: told of every event with the actions that it caused, once they are recorded.

    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.watch: Callable[[str, Any, msgspec.Struct, Sequence[Any]], None] | None = None
        self._sequences: dict[str, int] = {}

    def open(self, node: str, machine: Any) -> None:
        """A machine begins; memory needs no header."""

    def handle(self, node: str, machine: Any, event: msgspec.Struct, now: float) -> Sequence[Any]:
        """Let a machine take an event, record it with the actions, and check the machine."""
        actions: Sequence[Any] = machine.handle(event, now)
        self.write(now, node, event, actions)
        machine.validate()
        if self.watch is not None:
            self.watch(node, machine, event, actions)
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


@dataclass(frozen=True)
class Verdict:
    """One machine's replay."""

    segment: str
    events: int
    actions: int
    divergence: Divergence | None
    truncated: int

    @property
    def same(self) -> bool:
        return self.divergence is None

    def as_dict(self) -> dict[str, Any]:
        differs = None if self.divergence is None else str(self.divergence)
        return {"segment": self.segment, "events": self.events, "actions": self.actions, "differs": differs}

    def __str__(self) -> str:
        cut = f", {self.truncated} line cut off" if self.truncated else ""
        counts = f"{self.segment}: {self.events} events, {self.actions} actions{cut}"
        return f"{counts}: the same" if self.divergence is None else f"{counts}: DIFFERENT\n{self.divergence}"


def replay_run(run_dir: Path) -> list[Verdict]:
    """Replay every segment of a run folder through a fresh machine.

    Raises:
        UserError: there is no tape here, or it is damaged or of another schema.
    """
    paths = sorted((run_dir / tape.TAPE_DIR).glob("*.jsonl"))
    if not paths:
        raise UserError(f"{run_dir}: no {tape.TAPE_DIR}/*.jsonl here: give a run folder")
    return [_replay_segment(path) for path in paths]


def _replay_segment(path: Path) -> Verdict:
    try:
        segment = tape.read_segment(path)
    except ValueError as error:
        raise UserError(str(error)) from None
    header, records = _checked(path, segment)
    if segment.truncated:  # the last event's actions may be incomplete
        last = max((i for i, r in enumerate(records) if r.kind == "event"), default=0)
        records = records[:last]
    try:
        divergence = replay(records, machine_of(header))
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: not an event of this farflung's machines: {error}") from None
    kinds = [r.kind for r in records]
    return Verdict(path.name, kinds.count("event"), kinds.count("action"), divergence, segment.truncated)


def _checked(path: Path, segment: tape.Segment) -> tuple[Record, list[Record]]:
    """Header and records of one machine, none missing. UserError otherwise."""
    if not segment.records or segment.records[0].kind != "header":
        raise UserError(f"{path}: no header in the first line: not the tape of a machine")
    for before, record in pairwise(segment.records):
        if record.seq != before.seq + 1 or record.kind not in ("event", "action"):
            detail = f"after seq {before.seq} comes {record.kind} {record.seq}"
            raise UserError(f"{path}: {detail}: lines are missing, or not of one machine")
    return segment.records[0], segment.records[1:]


def machine_of(header: Record) -> SyncerMachine | LearnerMachine:
    """A fresh machine as the one that wrote a segment was when it began.

    Raises:
        UserError: another schema, or a header that is not ours.
    """
    data = header.data
    if data.get("schema") != tape.SCHEMA:
        raise UserError(f"{header.node}: tape schema {data.get('schema')}, this farflung reads {tape.SCHEMA}")
    if data.get("machine") not in ("syncer", "learner"):
        raise UserError(f"{header.node}: {data.get('machine')} has no machine to replay")
    policy = msgspec.convert(data["policy"], Policy)
    if data["machine"] == "learner":
        return LearnerMachine(
            policy,
            learner=data["learner"],
            run=data["run"],
            address=data.get("address"),
            mbps=data.get("mbps"),
        )
    machine = SyncerMachine(
        policy, run=data["run"], num_learners=data["num_learners"], budget_tokens=data["budget_tokens"]
    )
    if (restored := data.get("restored")) is not None:
        saved = snapshot.decode(msgspec.json.encode(restored["snapshot"]))
        snapshot.restore(machine, saved, restored["now"])
    return machine


def replay(records: Iterable[Record], machine: SyncerMachine | LearnerMachine) -> Divergence | None:
    """Feed one machine's taped events to a fresh machine; None if every action is the taped one.

    Args:
        records: of one machine and incarnation, in order; headers are skipped.
        machine: made from the same policy and header as the one that wrote the tape.
    """
    kind = SyncerAction if isinstance(machine, SyncerMachine) else LearnerAction
    groups: list[tuple[Record, list[str]]] = []
    for record in records:
        if record.kind == "event":
            groups.append((record, []))
        elif record.kind == "action":
            groups[-1][1].append(_text(_as_today(record.data, kind)))
    for record, taped in groups:
        try:
            replayed = [_text(msgspec.to_builtins(action)) for action in _handle(machine, record)]
        except (AssertionError, LookupError) as error:
            replayed = [f"raised {error!r}"]
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


def _as_today(data: dict[str, Any], kind: Any) -> Any:
    """A taped action with the fields that have come since, at their defaults."""
    try:
        return msgspec.to_builtins(msgspec.convert(data, kind))
    except msgspec.ValidationError:  # not-a-number, which a tape holds as null; or a damaged tape
        return data


def _text(data: Any) -> str:
    """Comparable whatever the order of keys; not-a-number is null, as on a real tape."""
    return msgspec.json.encode(data, order="sorted").decode()
