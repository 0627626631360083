"""Gossip learners' machines by the thousand in one process: no tensors, no links, offers arrive at once.

Steps and messages take no time; only timers make it pass. `farflung.testing.World` is for everything else.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import mailbox as box
from farflung.protocol import messages as msg
from farflung.protocol.learner import LearnerMachine
from farflung.protocol.policy import Policy

RUN = "crowd"
TOKENS_PER_STEP = 10


@dataclass
class Trainer:
    """What a trainer would do between two boundaries, in steps."""

    step: int = 0
    limit: int = 0
    snapshot: box.Snapshot | None = None
    mix: box.Mix | None = None

    def take(self, command: Any) -> None:
        kind = type(command)
        if kind is box.RunUntil:
            self.limit = command.step
        elif kind is box.Snapshot:
            self.snapshot = command
        elif kind is box.Mix:
            self.mix = command

    @property
    def may_turn(self) -> bool:
        return self.step < self.limit or (self.mix is not None and self.mix.at_step <= self.step)

    def turn(self) -> box.BoundaryPassed:
        """The next boundary, with what was due there."""
        tokens = TOKENS_PER_STEP if self.step < self.limit else 0
        self.step += tokens > 0
        taken, mixed = [], None
        if self.mix is not None and self.mix.at_step <= self.step:
            distances: list[float | None] = [1.0] * len(self.mix.parts)
            mixed = box.Mixed(round=self.mix.round, steps=1, tokens=10, distances=distances, correction=0.5)
            self.mix = None
        elif self.snapshot is not None and self.snapshot.at_step <= self.step:
            taken.append(
                box.Taken(
                    fragment=0, round=self.snapshot.round, base_version=0, steps=1, tokens=10, num_bytes=8
                )
            )
            self.snapshot = None
        return box.BoundaryPassed(step=self.step, tokens=tokens, step_s=0.1, taken=taken, mixed=mixed)


class Crowd:
    """Learners that all belong to one epoch.

    Args:
        policy: of a gossip method.
        names: of the learners.
        hear: told of everything that a learner says to the hub, which is not here.

    >>> from farflung.methods import ld_sgd
    >>> crowd = Crowd(ld_sgd(sync_every_steps=2).policy, "abcd").run(rounds=3)
    >>> crowd.rounds, crowd.meetings, crowd.missed
    ({'a': 3, 'b': 3, 'c': 3, 'd': 3}, 12, 0)
    """

    def __init__(
        self,
        policy: Policy,
        names: Iterable[str],
        hear: Callable[[str, msg.LearnerMessage], None] = lambda name, message: None,
    ) -> None:
        self.policy, self.now, self.events, self._hear = policy, 0.0, 0, hear
        self.machines = {name: LearnerMachine(policy, learner=name, address=name) for name in sorted(names)}
        self.trainers = {name: Trainer() for name in self.machines}
        self.rounds = dict.fromkeys(self.machines, 0)  # ended
        self.meetings = self.missed = 0  # sides of meetings
        self._timers: list[tuple[float, int, str, str]] = []
        self._newest: dict[tuple[str, str], int] = {}  # the timer that counts, of each name
        self._numbers = itertools.count()
        self._turns: deque[str] = deque()
        self._admitted: act.Admit | None = None
        for name in self.machines:
            self._install(name)
        self.tell(self.epoch())

    def epoch(self, number: int = 1, round: int = 0) -> msg.Epoch:
        """An epoch of all of them."""
        members = [msg.Peer(name=name, address=name) for name in self.machines]
        return msg.Epoch(number=number, round=round, seed=7, members=members)

    def tell(self, message: msg.SyncerMessage) -> None:
        """The hub says this to everybody."""
        for name in self.machines:
            self.feed(name, ev.Received(message=message))

    def run(self, rounds: int) -> Crowd:
        """Until everybody has ended so many rounds, all in all."""
        self._turns.extend(self.machines)
        while self._turns or self._timers:
            while self._turns:
                name = self._turns.popleft()
                trainer = self.trainers[name]
                if self.rounds[name] < rounds and trainer.may_turn:
                    report = trainer.turn()
                    if report.mixed is not None:
                        self.rounds[name] += 1
                    self.feed(name, ev.Reported(report=report))
                    self._turns.append(name)
            if all(done >= rounds for done in self.rounds.values()):
                return self
            self._ring()
        raise AssertionError(f"nothing happens any more: {min(self.rounds.values())} of {rounds} rounds")

    # ---- one learner ---------------------------------------------------------------------------------

    def _install(self, name: str) -> None:
        self.feed(name, ev.Reported(report=box.Ready(learner=name, fingerprint="f", layout="{}", method="m")))
        self.feed(name, ev.LinkUp())
        for message in (
            msg.Welcome(run=RUN, incarnation=1, index=0, tokens=0, budget_tokens=10**12),
            msg.Install(versions=[0], cursor=0, step=0, syncer_step=0, state=None, reason="birth"),
        ):
            self.feed(name, ev.Received(message=message))
        self.feed(name, ev.Fetched(fragment=0, version=0))
        proof = box.Loaded(versions=[0], digests=["0"], inner_digest=None, lr=None, cursor=0, step=0)
        self.feed(name, ev.Reported(report=proof))

    def feed(self, name: str, event: ev.LearnerEvent) -> None:
        """Let a machine take an event, and do what it asks for."""
        self.events += 1
        for action in self.machines[name].handle(event, self.now):
            if isinstance(action, act.Post):
                self.trainers[name].take(action.command)
                self._turns.append(name)
            elif isinstance(action, act.Say):
                self._said(name, action.message)
            elif isinstance(action, act.Offer):
                self._offer(name, action)
            elif isinstance(action, act.Admit):
                self._admitted = action
            elif isinstance(action, act.SetTimer):
                self._set(name, action)

    def _offer(self, name: str, offer: act.Offer) -> None:
        self.feed(offer.partner, ev.Knocked(object=offer.object))
        assert self._admitted is not None and self._admitted.object == offer.object
        if self._admitted.slot is None:
            refusal = self._admitted.refusal
            self.feed(name, ev.UploadFailed(object=offer.object, reason=refusal, refusal=refusal))
        else:
            self.feed(offer.partner, ev.Arrived(object=offer.object, num_bytes=offer.num_bytes))
            self.feed(name, ev.Uploaded(object=offer.object, sent_bytes=offer.num_bytes))

    def _said(self, name: str, message: msg.LearnerMessage) -> None:
        if isinstance(message, msg.Boundary):
            if message.mixed is not None:
                missed = sum(1 for meeting in message.mixed.meetings if meeting.missed)
                self.missed += missed
                self.meetings += len(message.mixed.meetings) - missed
            if message.sequence % 8 == 0:
                self.feed(name, ev.Received(message=msg.Progress(tokens=0, sequence=message.sequence)))
        self._hear(name, message)

    # ---- time ----------------------------------------------------------------------------------------

    def _set(self, name: str, timer: act.SetTimer) -> None:
        number = self._newest[name, timer.name] = next(self._numbers)
        if timer.at_s is None:
            del self._newest[name, timer.name]
        elif timer.name != "heartbeat":
            heapq.heappush(self._timers, (timer.at_s, number, name, timer.name))

    def _ring(self) -> None:
        """The next timer that still counts."""
        while self._timers:
            at_s, number, name, timer = heapq.heappop(self._timers)
            if self._newest.get((name, timer)) == number:
                del self._newest[name, timer]
                self.now = max(self.now, at_s)
                self.feed(name, ev.TimerFired(name=timer))
                return
