"""`farflung lab --order DIR`: the order of boundaries, snapshots, adoptions and merges of a run, executed again.

A run's asynchrony is all in its order. With the order taken from its tape, one process repeats what several did,
bit for bit (one thread, the same torch): agreement of runtime and lab is proven, or the tape says where it ends.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch

from farflung import tape
from farflung.config import REFERENCE, RunConfig
from farflung.engine.hub import HubState
from farflung.errors import UserError
from farflung.lab.body import LocalBody
from farflung.lab.task_body import task_body, task_plan
from farflung.protocol import actions as act
from farflung.protocol import mailbox as box
from farflung.protocol import messages as msg
from farflung.protocol import objects

KEPT = 8  # newest versions of a fragment: a learner may adopt one that the syncer has just let go of


class OrderBroken(Exception):
    """The repetition came to another result than the tape holds: one line says where."""


class Member:
    """What is known of one connection's learner while its messages are repeated."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.incarnation = self.index = 0
        self.install: msg.Install | None = None
        self.included: dict[tuple[int, int], int | None] = {}
        self.merged: set[tuple[int, int]] = set()
        self.body: LocalBody | None = None


class Repetition:
    """Executes one syncer's tape."""

    def __init__(self, config: RunConfig, records: list[tape.Record]) -> None:
        torch.set_num_threads(config.recipe.threads)
        self.config, self.records, self.task = config, records, config.task()
        self.plan = task_plan(config, self.task)
        self.hub = HubState(self.plan, config.method)
        self._members: dict[int, Member] = {}  # by connection
        self._bodies: dict[tuple[str, int], LocalBody] = {}  # by learner and incarnation
        self._newest: dict[str, LocalBody] = {}  # by learner
        self._payloads: dict[str, bytes] = {}
        self._states: dict[str, bytes] = {}
        self._donations = self._find_donations()

    def go(self) -> str:
        """Repeat everything; returns the model's digest.

        Raises:
            OrderBroken: some bits differ from what the tape says of them.
        """
        for record in self.records:
            if record.kind == "event" and record.type == "MessageArrived":
                self._message(record)
            elif record.kind == "event" and record.type == "MergeDone":
                digest = self.hub.digest(record.data["fragment"], record.data["version"])
                self._check(record, "digest of a merge", digest, record.data["digest"])
            elif record.kind == "action":
                self._action(record)
        return self.hub.model_digest()

    def _check(self, record: tape.Record, what: str, got: object, taped: object) -> None:
        if got != taped:
            at = f"seq {record.seq}, {record.t:.3f} s"
            raise OrderBroken(f"{what} differs at {at}: {got} here, {taped} on the tape")

    # ---- what the syncer did -------------------------------------------------------------------------

    def _action(self, record: tape.Record) -> None:
        match record.type:
            case "Merge":
                self.hub.merge(msgspec.convert(record.data, act.Merge))
                fragment, version = record.data["fragment"], record.data["version"]
                self.hub.retire(fragment, version - KEPT)
            case "Discard":
                self.hub.discard(record.data["object"])
            case "Send":
                self._sent(record.data["connection"], record.data["message"])

    def _sent(self, connection: int, raw: dict[str, Any]) -> None:
        member = self._members.get(connection)
        if member is None:
            return
        match raw["type"]:
            case "Welcome":
                member.incarnation, member.index = raw["incarnation"], raw["index"]
                member.body = self._bodies.get((member.name, member.incarnation))
            case "Install":
                member.install = msgspec.convert(raw, msg.Install)
            case "Announce":
                member.included[raw["fragment"], raw["version"]] = raw["included"]
            case "FateOf" if raw["fate"] == "merged":
                member.merged.add((raw["fragment"], raw["round"]))

    # ---- what learners said --------------------------------------------------------------------------

    def _message(self, record: tape.Record) -> None:
        connection, raw = record.data["connection"], record.data["message"]
        if raw["type"] == "Join":
            known = [m for m in self._members.values() if m.name == raw["learner"]]
            member = self._members[connection] = Member(raw["learner"])
            if raw["incarnation"] is not None and known:  # a reattachment goes on where it was
                member.included, member.merged = known[-1].included, known[-1].merged
            return
        member = self._members[connection]
        match raw["type"]:
            case "Seeded":
                self._seed(record)
            case "Installed":
                self._install(record, member, msgspec.convert(raw, msg.Installed))
            case "Boundary":
                self._boundary(record, member, msgspec.convert(raw, msg.Boundary))
            case "Contribute":
                name = objects.contribution(member.name, member.incarnation, raw["fragment"], raw["round"])
                if name in self._payloads:
                    self.hub.receive(name, raw["fragment"], self._payloads.pop(name))

    def _seed(self, record: tape.Record) -> None:
        body = task_body(self.config, self.task)
        body.trainer.island.seed()
        for p in range(self.plan.num_fragments):
            self.hub.seed(p, body.read(p, seed=True))
        digests = [self.hub.digest(p, 0) for p in range(self.plan.num_fragments)]
        self._check(record, "digests of the seed", digests, record.data["digests"])

    def _install(self, record: tape.Record, member: Member, installed: msg.Installed) -> None:
        assert member.install is not None
        body = member.body = task_body(self.config, self.task)
        former = self._newest.get(member.name)
        if former is not None:
            body.inherit(former)
        self._bodies[member.name, member.incarnation] = self._newest[member.name] = body
        offer = member.install.state
        if offer is not None:
            body.put_state(self._states[offer.transfer])
        for p, version in enumerate(installed.versions):
            body.write(p, self.hub.value_bytes(p, version))
        body.take(box.Begin(run=self.config.run, incarnation=member.incarnation, index=member.index))
        body.take(
            box.Load(
                versions=installed.versions, cursor=installed.cursor, step=installed.step,
                state=offer is not None, own=member.install.own,
            ),
        )  # fmt: skip
        (loaded,) = body.idle()
        assert isinstance(loaded, box.Loaded)
        self._check(record, "installed parameters", loaded.digests, installed.digests)
        self._check(record, "installed inner state", loaded.inner_digest, installed.inner_digest)
        self._check(record, "own state", loaded.own_digests, installed.own_digests)

    def _boundary(self, record: tape.Record, member: Member, boundary: msg.Boundary) -> None:
        body = member.body
        if body is None:
            return
        for fragment, version in boundary.adopted:
            body.write(fragment, self.hub.value_bytes(fragment, version))
            included = member.included.get((fragment, version))
            body.take(box.Adopt(fragment=fragment, version=version, included=included))
        self._settle(member, body, boundary)
        for fragment, number in boundary.snapshots:
            body.take(box.Snapshot(fragment=fragment, round=number))
        if boundary.tokens:
            body.begin_at(boundary.progress_tokens, self.config.budget_tokens)
            reports = body.end(boundary.step_s)
        else:
            reports = body.idle()
        self._compare(record, member, boundary, reports)
        transfer = self._donations.get((member.name, member.incarnation, boundary.step))
        if transfer is not None and transfer not in self._states:
            self._states[transfer] = body.trainer.inner.donate()

    def _settle(self, member: Member, body: LocalBody, boundary: msg.Boundary) -> None:
        """A snapshot proves that the one before it had its fate."""
        again = {fragment for fragment, _ in boundary.snapshots}
        for taken in body.trainer.island.outstanding():
            if taken.fragment in again:
                merged = (taken.fragment, taken.round) in member.merged
                body.take(box.Settle(fragment=taken.fragment, round=taken.round, merged=merged))

    def _compare(
        self, record: tape.Record, member: Member, boundary: msg.Boundary, reports: list[box.AnyReport]
    ) -> None:
        passed = next((r for r in reports if isinstance(r, box.BoundaryPassed)), None)
        adopted = sorted(passed.adopted) if passed else []
        taken = passed.taken if passed else []
        self._check(record, f"what {member.name} adopted", adopted, sorted(boundary.adopted))
        sent = sorted((t.fragment, t.round) for t in taken)
        self._check(record, f"what {member.name} sent", sent, sorted(boundary.snapshots))
        if boundary.tokens and passed is not None:
            self._check(record, f"loss of {member.name}", passed.loss, boundary.loss)
        for t in taken:
            name = objects.contribution(member.name, member.incarnation, t.fragment, t.round)
            assert member.body is not None
            self._payloads[name] = member.body.read(t.fragment, seed=False)

    def _find_donations(self) -> dict[tuple[str, int, int], str]:
        """(donor, incarnation, step) -> transfer, for every state that was handed on."""
        names: dict[int, str] = {}
        incarnations: dict[int, int] = {}
        found: dict[tuple[str, int, int], str] = {}
        for record in self.records:
            data = record.data
            if record.type == "MessageArrived" and data["message"]["type"] == "Join":
                names[data["connection"]] = data["message"]["learner"]
            elif record.type == "Send" and data["message"]["type"] == "Welcome":
                incarnations[data["connection"]] = data["message"]["incarnation"]
            elif record.type == "MessageArrived" and data["message"]["type"] == "StateReady":
                connection, ready = data["connection"], data["message"]
                place = (names[connection], incarnations[connection], ready["step"])
                found[place] = ready["transfer"]
        return found


def repeat(run_dir: Path, config: RunConfig) -> str:
    """Execute the order of a run folder's syncer; returns the digest of the model that comes out.

    Raises:
        UserError: there is no such tape or it is not whole, the method has no order, the run did not finish or was
            resumed (its order has a gap), or its model is not the task's.
        OrderBroken: bits differ.
    """
    method = config.recipe.method
    if method == REFERENCE or config.policy.topology == "gossip":
        raise UserError(f"{run_dir}: method = {method!r}: an order is repeated for hub methods only")
    segments = sorted((run_dir / tape.TAPE_DIR).glob("syncer*.jsonl"))
    if len(segments) != 1:
        raise UserError(
            f"{run_dir}: --order needs exactly one {tape.TAPE_DIR}/syncer.jsonl, here are {len(segments)}"
        )
    records = _whole(segments[0])
    if not _trains_its_task(config, records):
        raise UserError(
            f"{run_dir}: its learners brought a model of their own: only runs of a recipe's task can be repeated"
        )
    return Repetition(config, records).go()


def _whole(path: Path) -> list[tape.Record]:
    """A finished syncer's records, none missing. UserError otherwise."""
    try:
        records = tape.read_segment(path).records
    except ValueError as error:
        raise UserError(str(error)) from None
    if not records or records[0].kind != "header":
        raise UserError(f"{path}: no header in the first line: --order needs a whole tape")
    if records[0].data.get("schema") != tape.SCHEMA:
        schema = records[0].data.get("schema")
        raise UserError(f"{path}: tape schema {schema}, this farflung reads {tape.SCHEMA}")
    for before, record in pairwise(records):
        if record.seq != before.seq + 1:
            raise UserError(
                f"{path}: after seq {before.seq} comes {record.seq}: lines are missing; --order needs a whole tape"
            )
    ended = next((r.data["reason"] for r in reversed(records) if r.type == "Finished"), None)
    if ended != "finished":
        how = f"the run was {ended}" if ended else f"the tape breaks off after seq {records[-1].seq}"
        raise UserError(f"{path}: {how}: --order needs a run that finished in one go")
    return records


def _trains_its_task(config: RunConfig, records: list[tape.Record]) -> bool:
    """Whether the first learner that was let in has the model of the recipe's task."""
    task = config.task()
    try:
        expected = task_plan(config, task).fingerprint()
    except ValueError:  # the task's model has not so many fragments
        return False
    said: dict[int, str] = {}
    for record in records:
        if record.type == "MessageArrived" and record.data["message"]["type"] == "Join":
            said[record.data["connection"]] = record.data["message"]["fingerprint"]
        elif record.type == "Send" and record.data["message"]["type"] == "Welcome":
            return said[record.data["connection"]] == expected
    return True
