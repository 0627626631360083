"""A learner's traffic in fragments: what it holds, what is on its way down, what is on its way up.

Per fragment there is one downlink slot (a version being fetched or waiting to be adopted) and one uplink slot
(a contribution, owned until its fate is known). Order trap (spec, section 2): an invitation may overtake the
announcement that closed the previous round; work that was merged is never sent a second time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import mailbox as box
from farflung.protocol import messages as msg
from farflung.protocol import objects
from farflung.protocol.lockstep import snapshot_step

if TYPE_CHECKING:
    from farflung.protocol.learner import LearnerMachine


@dataclass
class Outgoing:
    """The last contribution of a fragment, from snapshot to fate."""

    taken: box.Taken
    object: str
    taken_s: float
    uploaded: bool = False
    message: msg.Contribute | None = None
    fate: msg.Fate | None = None


@dataclass
class Line:
    """Everything about one fragment at this learner."""

    held: int = -1
    newest: int = -1
    included: int | None = None  # round of our last contribution inside `newest`
    fetching: int | None = None
    base: int | None = None  # what is fetched, or lies in the slot, are increments from this version on
    whole: bool = False  # increments were not to be had: the next download is of the whole value
    posted: int | None = None  # adoption posted, not yet executed
    posted_included: int | None = None
    invited: int | None = None  # invitation not yet turned into a snapshot
    snapshot: int | None = None  # snapshot posted, not yet taken
    adopted_step: int | None = None  # own step at the last adoption
    outgoing: Outgoing | None = None


@dataclass
class HandIn:
    versions: list[int]
    rounds: list[int]
    asked: bool = False  # final snapshots were posted
    done: bool = False
    left: set[int] = field(default_factory=set)  # fragments not yet handed in


class Exchange:
    def __init__(self, machine: LearnerMachine):
        self.machine, self.policy = machine, machine.policy
        self.lines = [Line() for _ in range(machine.policy.num_fragments)]
        self.last: HandIn | None = None
        self.wait_until_s: float | None = None  # the deadline of the wait that the trainer is in
        self.limit: box.RunUntil = box.RunUntil(step=None)
        self.lead_from: int | None = None  # own step minus syncer's step when this incarnation started
        self.wanted_step = 0  # that many steps are needed to have something to send, whatever the lead

    @property
    def held(self) -> list[int]:
        return [line.held for line in self.lines]

    def validate(self) -> None:
        for p, line in enumerate(self.lines):
            assert line.held <= line.newest, f"fragment {p} holds {line.held}, newest is {line.newest}"
            assert not (line.fetching is not None and line.posted is not None), (
                f"fragment {p}: slot used twice"
            )

    def start(self, versions: list[int], step: int, syncer_step: int) -> None:
        """The trainer holds these versions and begins to train."""
        for p, version in enumerate(versions):
            line = self.lines[p] = Line(held=version, newest=max(version, self.lines[p].newest))
            line.included = None
            if self.policy.pace == "lockstep":
                self._schedule(p, version + 1)
        self.lead_from, self.wanted_step, self.wait_until_s = step - syncer_step, 0, None
        self._limit(syncer_step)
        for p in range(len(self.lines)):
            self.fetch(p)

    def resume(self, outstanding: list[box.Taken]) -> None:
        """Contributions that a former sidecar was to send, still in their slots."""
        for taken in outstanding:
            self._taken(taken)

    # ---- down ----------------------------------------------------------------------------------------

    def announced(self, message: msg.Announce) -> None:
        line = self.lines[message.fragment]
        if message.version > line.newest:
            line.newest, line.included = message.version, message.included
        if self.machine.phase in ("training", "finishing"):
            self._limit(message.syncer_step)
            self.fetch(message.fragment)

    def fetch(self, p: int) -> None:
        """Fetch the newest version if the slot is free and it is news."""
        line = self.lines[p]
        if line.fetching is None and line.posted is None and line.newest > line.held:
            line.fetching, line.posted_included = line.newest, line.included
            near = line.newest - line.held <= self.policy.versions_kept
            by_increments = self.policy.downlink_codec is not None and near and not line.whole
            line.base = line.held if by_increments else None
            self.machine.emit(act.Fetch(fragment=p, version=line.newest, base_version=line.base))

    def fetched(self, p: int, version: int) -> None:
        line = self.lines[p]
        if line.fetching != version:
            return
        line.fetching, line.posted, line.whole = None, version, False
        at_step = 0
        if self.policy.pace == "lockstep" and self.last is None:
            at_step = snapshot_step(p, line.held + 1, *self._cycle) + self.policy.overlap_steps
        self.machine.post(self._adopt(p, line, at_step))
        if self.policy.pace == "lockstep" and self.last is None:
            self._schedule(p, version + 1)
            self._limit(0)

    @staticmethod
    def _adopt(p: int, line: Line, at_step: int = 0) -> box.Adopt:
        assert line.posted is not None
        return box.Adopt(
            fragment=p, version=line.posted, included=line.posted_included, at_step=at_step,
            base_version=line.base,
        )  # fmt: skip

    def fetch_failed(self, event: ev.FetchFailed) -> None:
        line = self.lines[event.fragment]
        if line.fetching != event.version:
            return
        line.fetching = None
        no_increments = line.base is not None
        if event.gone and (no_increments or line.newest > event.version):
            line.whole = no_increments
            self.fetch(event.fragment)
            return
        retry_s = self.machine.now + self.policy.heartbeat_s
        self.machine.emit(act.SetTimer(name=f"fetch.{event.fragment}", at_s=retry_s))

    # ---- pace ----------------------------------------------------------------------------------------

    @property
    def _cycle(self) -> tuple[int, int]:
        return self.policy.sync_every_steps, self.policy.num_fragments

    def _schedule(self, p: int, round: int) -> None:
        """Lockstep: the snapshot for a round is posted ahead, at its exact step."""
        self.lines[p].snapshot = round
        self.machine.post(
            box.Snapshot(fragment=p, round=round, at_step=snapshot_step(p, round, *self._cycle))
        )

    def _limit(self, syncer_step: int) -> None:
        """How far the trainer may run without hearing from us."""
        if self.last is not None:
            return
        if self.policy.pace == "lockstep":
            step, p = min(
                (snapshot_step(p, self._certain(line) + 1, *self._cycle) + self.policy.overlap_steps, p)
                for p, line in enumerate(self.lines)
            )
            reason = f"waiting for version {self._certain(self.lines[p]) + 1} of fragment {p}"
            self._hold(step, reason)
        elif self.policy.max_lead_steps is not None and self.lead_from is not None:
            step = self.lead_from + syncer_step + self.policy.max_lead_steps
            self._hold(max(step, self.wanted_step), "too far ahead of the syncer")

    def _hold(self, step: int, reason: str) -> None:
        self.limit = box.RunUntil(step=step, reason=reason)
        self.machine.post(self.limit)
        self._watch_wait()

    def _watch_wait(self) -> None:
        """A trainer that stands at its limit gets a deadline; one that may go on has none."""
        waits = self.limit.step is not None and self.machine.step >= self.limit.step and self.last is None
        if waits and self.wait_until_s is None:
            self.wait_until_s = self.machine.now + self.policy.lease_s
        elif not waits:
            self.wait_until_s = None
        self.machine.emit(act.SetTimer(name="wait", at_s=self.wait_until_s))

    def still_waiting(self) -> None:
        """The deadline of a wait passed: say what for, look again for what may have been missed, go on waiting."""
        self.wait_until_s = self.machine.now + self.policy.lease_s
        self.machine.note("waiting", reason=self.limit.reason, deadline_s=self.wait_until_s)
        self.machine.emit(act.SetTimer(name="wait", at_s=self.wait_until_s))
        for p in range(len(self.lines)):
            self.fetch(p)

    @staticmethod
    def _certain(line: Line) -> int:
        return line.posted if line.posted is not None else line.held

    # ---- up ------------------------------------------------------------------------------------------

    def invited(self, message: msg.Invite) -> None:
        if self.machine.phase != "training":
            return
        line = self.lines[message.fragment]
        out = line.outgoing
        if out is not None and out.taken.round == message.round:
            return  # it is on its way
        line.invited = message.round
        if out is not None and out.fate is None and out.taken.round < message.round:
            self._close(message.fragment, merged=False)  # its round is over: control is FIFO, so it was late
        self._answer(message.fragment)

    def _answer(self, p: int) -> None:
        """Turn a waiting invitation into a snapshot, unless merged work would be sent again."""
        line = self.lines[p]
        if line.invited is None or line.snapshot == line.invited:
            return
        if line.outgoing is not None and line.outgoing.fate in (None, "merged"):
            return
        line.snapshot, line.invited = line.invited, None
        self.machine.post(box.Snapshot(fragment=p, round=line.snapshot))
        self._want_work(line)

    def _want_work(self, line: Line) -> None:
        """A snapshot waits for work of its own: who stands at its lead since an adoption may do one more step.

        Else the round waits for the learner and the learner for the round.
        """
        step = self.machine.step
        if self.limit.step is None or self.limit.step > step or line.adopted_step != step:
            return
        if self.policy.pace == "free" and self.last is None:
            self.wanted_step = step + 1
            self._hold(self.wanted_step, self.limit.reason)

    def boundary(self, report: box.BoundaryPassed) -> None:
        """The trainer executed commands at a boundary."""
        if self.limit.step is not None:
            self._watch_wait()
        for p, version in report.adopted:
            self._adopted(p, version)
        for taken in report.taken:
            self._taken(taken)
        if self.last is not None:
            self.last.left -= set(report.skipped)
            self._go_on_handing_in()

    def _adopted(self, p: int, version: int) -> None:
        line = self.lines[p]
        line.held, line.posted, line.adopted_step = version, None, self.machine.step
        out = line.outgoing
        if out is not None:
            included = line.posted_included is not None and line.posted_included >= out.taken.round
            if included or (out.fate is not None and not self.policy.carries_tokens):
                line.outgoing = None  # inclusion tells its fate, should the message come later
        self.fetch(p)
        self._answer(p)
        if line.snapshot is not None:
            self._want_work(line)

    def _taken(self, taken: box.Taken) -> None:
        line = self.lines[taken.fragment]
        assert self.machine.incarnation is not None
        name = objects.contribution(
            self.machine.learner, self.machine.incarnation, taken.fragment, taken.round
        )
        if line.outgoing is not None:
            self._close(taken.fragment, merged=line.outgoing.fate == "merged")
        line.snapshot = None
        line.outgoing = Outgoing(taken, name, self.machine.now)
        self.machine.emit(act.Upload(object=name, fragment=taken.fragment, num_bytes=taken.num_bytes))

    def _find(self, object_name: str) -> tuple[int, Outgoing] | None:
        for p, line in enumerate(self.lines):
            if line.outgoing is not None and line.outgoing.object == object_name:
                return p, line.outgoing
        return None

    def uploaded(self, object_name: str) -> None:
        found = self._find(object_name)
        if found is None:
            return
        p, out = found
        taken, out.uploaded = out.taken, True
        out.message = msg.Contribute(
            fragment=p, round=taken.round, base_version=taken.base_version, steps=taken.steps,
            tokens=taken.tokens, num_bytes=taken.num_bytes, sync_s=self.machine.now - out.taken_s,
        )  # fmt: skip
        self.machine.say(out.message)
        if self.last is not None and taken.round == self.last.rounds[p]:
            self.last.left.discard(p)
            self._go_on_handing_in()

    def upload_failed(self, object_name: str, reason: str) -> None:
        found = self._find(object_name)
        if found is None:
            return
        p, out = found
        self.machine.note("upload_failed", fragment=p, round=out.taken.round, reason=reason)
        self._close(p, merged=False)
        if self.last is not None:
            self.last.left.discard(p)
            self._go_on_handing_in()
        self._look_again(p)

    def _look_again(self, p: int) -> None:
        """A contribution came to nothing. In lockstep nobody invites again, and all may wait for us."""
        if self.policy.pace == "lockstep" and self.last is None:
            again_s = self.machine.now + self.policy.heartbeat_s
            self.machine.emit(act.SetTimer(name=f"again.{p}", at_s=again_s))

    def try_again(self, p: int) -> None:
        """Send once more for a round that does not go on without us."""
        line = self.lines[p]
        if self.machine.phase == "training" and line.outgoing is None and line.newest == line.held:
            self._schedule(p, line.held + 1)

    def fate(self, message: msg.FateOf) -> None:
        out = self.lines[message.fragment].outgoing
        if out is None or out.taken.round != message.round or out.fate is not None:
            return
        if message.fate == "merged":
            out.fate = message.fate
            self.machine.post(box.Settle(fragment=message.fragment, round=message.round, merged=True))
        else:
            self._close(message.fragment, merged=False)
            if message.fate == "cancelled":  # the run is ending, the invitations with the round
                self.lines[message.fragment].invited = None
            else:
                self._look_again(message.fragment)
        self._answer(message.fragment)

    def _close(self, p: int, merged: bool) -> None:
        """A contribution came to nothing: its slot is free, its work still in the parameters."""
        line = self.lines[p]
        assert line.outgoing is not None
        if not line.outgoing.uploaded:
            self.machine.emit(act.CancelUpload(object=line.outgoing.object))
        self.machine.post(box.Settle(fragment=p, round=line.outgoing.taken.round, merged=merged))
        line.outgoing = None

    def give_up(self) -> None:
        """Whatever is still without a fate stays in the parameters, to be sent again after a resume."""
        for p, line in enumerate(self.lines):
            line.invited = None
            if line.outgoing is not None and line.outgoing.fate is None:
                self._close(p, merged=False)

    def abandon(self) -> None:
        """This incarnation is over: nothing of it goes up any more."""
        for line in self.lines:
            if line.outgoing is not None and not line.outgoing.uploaded:
                self.machine.emit(act.CancelUpload(object=line.outgoing.object))
        self.lines = [Line() for _ in self.lines]

    def reattached(self) -> None:
        """The link is back: repeat what the syncer may not have heard."""
        for p, line in enumerate(self.lines):
            if line.outgoing is not None and line.outgoing.message is not None and line.outgoing.fate is None:
                self.machine.say(line.outgoing.message)
            if line.fetching is None:
                self.fetch(p)
        if self.last is not None and self.last.done:
            self.machine.say(msg.HandedIn())

    # ---- handing in ----------------------------------------------------------------------------------

    def hand_in(self, versions: list[int], rounds: list[int]) -> None:
        if self.last is not None:
            return  # a repeat, after a reattachment
        self.last = HandIn(versions, rounds, left=set(range(len(rounds))))
        for p, line in enumerate(self.lines):
            line.invited = None
            line.newest = max(line.newest, versions[p])
            if line.posted is not None:  # lockstep may have posted it for a later step
                self.machine.post(self._adopt(p, line))
            self.fetch(p)
        self._go_on_handing_in()

    def _go_on_handing_in(self) -> None:
        last = self.last
        assert last is not None
        if not last.asked:
            if any(line.held < last.versions[p] for p, line in enumerate(self.lines)):
                return
            last.asked = True
            for p, line in enumerate(self.lines):
                if line.outgoing is not None:
                    self._close(p, merged=line.outgoing.fate == "merged")
                line.snapshot = last.rounds[p]
                self.machine.post(box.Snapshot(fragment=p, round=last.rounds[p], final=True))
        if not last.left and not last.done:
            last.done = True
            self.machine.say(msg.HandedIn())
