"""A syncer and a learner fed by hand: no sockets, no tensors, every event written in the test."""

from typing import Any

import msgspec

from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import mailbox as box
from farflung.protocol import messages as msg
from farflung.protocol.learner import LearnerMachine
from farflung.protocol.policy import Policy
from farflung.protocol.syncer import SyncerMachine
from farflung.testing import MemoryTape

RUN = "by-hand"


def policy(**changes: Any) -> Policy:
    """Two fragments, a round a second when a step takes half a second."""
    plain = {"method": "decoupled", "num_fragments": 2, "sync_every_steps": 4, "overlap_steps": 2}
    return Policy(**{**plain, "lease_s": 5.0, **changes})


class Desk:
    """Plays all learners to a syncer. Versions have the digests ``"p.v"``."""

    def __init__(self, *names: str, **changes: Any) -> None:
        self.policy = policy(**changes)
        self.machine = SyncerMachine(self.policy, run=RUN, num_learners=3, budget_tokens=10**9)
        self.tape = MemoryTape()
        self.now = 0.0
        self.lines: dict[str, int] = {}  # learner: connection
        self.sequences: dict[str, int] = {}
        self.last_line = 0
        for name in names:
            self.join(name)
        if names:
            self.say(
                names[0], msg.Seeded(), finite=True, digests=self.digests([0] * self.policy.num_fragments)
            )
            for name in names:
                self.install(name)

    # ---- events ------------------------------------------------------------------------------------

    def take(self, event: ev.SyncerEvent) -> list[act.SyncerAction]:
        actions = self.machine.handle(event, self.now)
        self.tape.write(self.now, "syncer", event, actions)
        self.machine.validate()
        return actions

    def wait(self, seconds: float, *names: str) -> None:
        """Let time pass; these learners send heartbeats, and every lease is looked at."""
        self.now += seconds
        for name in names:
            self.say(name, msg.Heartbeat())
        self.take(ev.TimerFired(name="lease"))

    def join(self, name: str, **changes: Any) -> list[act.SyncerAction]:
        self.last_line += 1
        self.lines[name] = self.last_line
        if changes.get("incarnation") is None:
            self.sequences[name] = 0
        method = self.machine.admission.method_digest
        plain = {"protocol": msg.PROTOCOL, "run": None, "fingerprint": "f", "layout": "{}", "method": method}
        return self.say(name, msg.Join(**{**plain, "learner": name, **changes}))

    def say(self, name: str, message: msg.LearnerMessage, **found: Any) -> list[act.SyncerAction]:
        return self.take(ev.MessageArrived(connection=self.lines[name], message=message, **found))

    def install(self, name: str, **changes: Any) -> list[act.SyncerAction]:
        """Answer the last `Install` with what it asked for."""
        asked = self.heard(name, msg.Install)[-1]
        inner = {} if asked.state is None else {"inner_digest": asked.state.digest, "lr": 0.1}
        plain = {"versions": asked.versions, "digests": self.digests(asked.versions), "cursor": asked.cursor}
        proof = {"inner_digest": None, "lr": None, **plain, "step": asked.step, **inner, **changes}
        return self.say(name, msg.Installed(**proof))

    def boundary(self, name: str, tokens: int = 10, **changes: Any) -> list[act.SyncerAction]:
        """A step of half a second ended."""
        self.sequences[name] += 1
        number = self.sequences[name]
        plain = {"sequence": number, "step": number, "tokens": tokens, "step_s": 0.5, "cursor": number}
        return self.say(name, msg.Boundary(**{**plain, **changes}))

    def send(
        self, name: str, round: int, fragment: int = 0, base: int = 0, **found: Any
    ) -> list[act.SyncerAction]:
        """A contribution of one step arrives."""
        numbers = {"fragment": fragment, "round": round, "base_version": base}
        message = msg.Contribute(**numbers, steps=1, tokens=10, num_bytes=4, sync_s=0.1)
        return self.say(name, message, **{"finite": True, "norm": 1.0, **found})

    def contribute(
        self, name: str, round: int, fragment: int = 0, base: int = 0, **found: Any
    ) -> list[act.SyncerAction]:
        """Train a step, snapshot, and send it."""
        self.boundary(name, snapshots=[(fragment, round)])
        return self.send(name, round, fragment, base, **found)

    def merged(self, merge: act.Merge, finite: bool = True) -> list[act.SyncerAction]:
        p, version = merge.fragment, merge.version
        digest = self.digests([version] * self.policy.num_fragments)[p]
        return self.take(
            ev.MergeDone(fragment=p, version=version, finite=finite, norm=1.0, digest=digest, merge_s=0.01)
        )

    def round(self, *names: str) -> act.Merge:
        """The open round of fragment 0 gets these contributions; returns the merge that followed."""
        number = self.open_round(0)
        assert number is not None, self.story()
        base = self.machine.merging.versions[0]
        actions = [a for name in names for a in self.contribute(name, number, base=base)]
        if not of(actions, act.Merge):
            self.now += 60.0  # deadlines and grace are over
            actions = self.take(ev.TimerFired(name="round.0", late_s=60.0))
        (merge,) = of(actions, act.Merge)
        return merge

    # ---- looking ------------------------------------------------------------------------------------

    def digests(self, versions: list[int]) -> list[str]:
        return [f"{p}.{v}" for p, v in enumerate(versions)]

    def open_round(self, fragment: int) -> int | None:
        found = self.machine.merging.rounds.open.get(fragment)
        return None if found is None else found.number

    def member(self, name: str) -> Any:
        return self.machine.membership.members[name]

    def heard(self, name: str, kind: type) -> list[Any]:
        """Every message of this kind that was sent on the learner's connections."""
        return [
            a.message
            for a in self.actions
            if isinstance(a, act.Send) and a.connection == self.lines[name] and isinstance(a.message, kind)
        ]

    @property
    def actions(self) -> list[Any]:
        return [msgspec.convert(r.data, act.SyncerAction) for r in self.tape.records if r.kind == "action"]

    def books(self) -> tuple[Any, ...]:
        """Versions, ledger and open rounds: what bad input must not change."""
        merging = self.machine.merging
        rounds = {p: (r.number, sorted(r.arrived)) for p, r in merging.rounds.open.items()}
        kept = [list(kept) for kept in merging.kept]
        return list(merging.versions), kept, self.machine.ledger.summary(), rounds

    def story(self) -> str:
        return self.tape.story()


class Island:
    """Plays syncer, trainer and network to a learner named ``a``."""

    def __init__(self, **changes: Any) -> None:
        self.policy = policy(**changes)
        self.machine = LearnerMachine(self.policy, learner="a")
        self.tape = MemoryTape()
        self.now = 0.0
        self.step = 0

    def take(self, event: ev.LearnerEvent) -> list[act.LearnerAction]:
        actions = self.machine.handle(event, self.now)
        self.tape.write(self.now, "a", event, actions)
        self.machine.validate()
        return actions

    def hear(self, message: msg.SyncerMessage) -> list[act.LearnerAction]:
        return self.take(ev.Received(message=message))

    def report(self, report: box.AnyReport) -> list[act.LearnerAction]:
        return self.take(ev.Reported(report=report))

    def training(self) -> "Island":
        """Up to the first step, all fragments at version 0."""
        P = self.policy.num_fragments
        self.report(box.Ready(learner="a", fingerprint="f", layout="{}", method="m"))
        self.take(ev.LinkUp())
        self.welcome()
        self.install([0] * P)
        return self

    def welcome(self, incarnation: int = 1) -> None:
        self.hear(msg.Welcome(run=RUN, incarnation=incarnation, index=0, tokens=0, budget_tokens=10**6))

    def install(self, versions: list[int]) -> list[act.LearnerAction]:
        plain = {"cursor": 0, "step": 0, "syncer_step": 0, "state": None, "reason": "birth"}
        self.hear(msg.Install(versions=versions, **plain))
        for p, version in enumerate(versions):
            self.take(ev.Fetched(fragment=p, version=version))
        proof = {"versions": versions, "digests": ["d"] * len(versions), "inner_digest": None, "lr": None}
        return self.report(box.Loaded(**proof, cursor=0, step=0))

    def boundary(self, tokens: int = 10, **changes: Any) -> list[act.LearnerAction]:
        self.step += 1
        return self.report(box.BoundaryPassed(step=self.step, tokens=tokens, **changes))

    def take_snapshot(self, round: int, base: int = 0) -> list[act.LearnerAction]:
        """The trainer snapshots fragment 0 for a round."""
        numbers = {"fragment": 0, "round": round, "base_version": base}
        return self.boundary(taken=[box.Taken(**numbers, steps=1, tokens=10, num_bytes=4)])

    def announce(self, version: int, included: int | None = None) -> list[act.LearnerAction]:
        return self.hear(msg.Announce(fragment=0, version=version, included=included, syncer_step=0))

    def story(self) -> str:
        return self.tape.story()


def of(actions: list[Any], kind: type) -> list[Any]:
    """The actions of this kind."""
    return [a for a in actions if isinstance(a, kind)]


def said(actions: list[Any], kind: type) -> list[Any]:
    """The messages of this kind among them, from either side."""
    messages = [a.message for a in actions if isinstance(a, act.Say | act.Send)]
    return [m for m in messages if isinstance(m, kind)]


def posted(actions: list[Any], kind: type) -> list[Any]:
    """The mailbox commands of this kind among them."""
    return [a.command for a in actions if isinstance(a, act.Post) and isinstance(a.command, kind)]


def notes(actions: list[Any], kind: str) -> list[dict[str, Any]]:
    return [a.data for a in actions if isinstance(a, act.Note) and a.kind == kind]


def upload_name(round: int, fragment: int = 0, incarnation: int = 1) -> str:
    return f"contribution.a.{incarnation}.{fragment}.{round}"
