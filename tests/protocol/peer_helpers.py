"""A gossip learner and a gossip hub fed by hand: every event written in the test."""

from typing import Any

from protocol_helpers import RUN, Desk, Island, of, posted

from farflung.methods import gasloc
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import mailbox as box
from farflung.protocol import messages as msg
from farflung.protocol.learner import LearnerMachine
from farflung.protocol.policy import Policy
from farflung.protocol.syncer import SyncerMachine
from farflung.testing import MemoryTape

SEED = 7
BYTES = 8  # of a vector


def gossip_policy(**changes: Any) -> Policy:
    """Rounds of two steps, random pairs, alpha = 1: the weight of a partner is a half."""
    plain = {"sync_every_steps": 2, "lease_s": 5.0, "mixing": 1.0, "outer_momentum": 0.0, "gathers": 0}
    return gasloc(**{**plain, **changes}).policy


def epoch(members: str = "ab", number: int = 1, round: int = 0, hidden: str = "") -> msg.Epoch:
    """Everybody is dialled by name, but who is hidden."""
    peers = [msg.Peer(name=n, address=None if n in hidden else f"//{n}") for n in sorted(members)]
    return msg.Epoch(number=number, round=round, seed=SEED, members=peers)


def offer(sender: str = "b", receiver: str = "a", round: int = 0, number: int = 1) -> str:
    return f"offer.{number}.{round}.{sender}.{receiver}"


class Peer(Island):
    """Plays trainer, hub and partners to a learner named ``a``."""

    def __init__(self, **changes: Any) -> None:
        self.policy = gossip_policy(**changes)
        self.machine = LearnerMachine(self.policy, learner="a", address="//a")
        self.tape = MemoryTape()
        self.now = 0.0
        self.step = 0

    @property
    def peer(self) -> Any:
        return self.machine.peer

    @property
    def meeting(self) -> Any:
        assert self.peer.meeting is not None, self.story()
        return self.peer.meeting

    # ---- the trainer -------------------------------------------------------------------------------

    def idle(self, **changes: Any) -> list[act.LearnerAction]:
        """Something is done at the boundary where the trainer stands."""
        return self.report(box.BoundaryPassed(step=self.step, **changes))

    def take_offer(self, round: int = 0, finite: bool = True) -> list[act.LearnerAction]:
        """The step ends at which the vector of a round is offered."""
        numbers = {"fragment": 0, "round": round, "base_version": 0, "steps": 1, "tokens": 10}
        return self.boundary(step_s=0.1, taken=[box.Taken(**numbers, num_bytes=BYTES, finite=finite)])

    def stand(self, round: int = 0) -> list[act.LearnerAction]:
        """Two steps, an offer at the end of the second, and there the trainer stands."""
        self.boundary(step_s=0.1)
        return self.take_offer(round)

    def mix(self, round: int = 0, *distances: float | None) -> list[act.LearnerAction]:
        """The round is mixed where the trainer stands."""
        mixed = box.Mixed(round=round, steps=2, tokens=20, distances=list(distances), correction=0.5)
        return self.idle(mixed=mixed)

    # ---- partners ----------------------------------------------------------------------------------

    def knock(self, name: str) -> act.Admit:
        (admit,) = of(self.take(ev.Knocked(object=name)), act.Admit)
        assert admit.object == name
        return admit

    def arrive(self, name: str) -> list[act.LearnerAction]:
        """A vector is admitted and comes whole."""
        assert self.knock(name).slot is not None, self.story()
        return self.take(ev.Arrived(object=name, num_bytes=BYTES))

    def acknowledge(self, to: str = "b", round: int = 0, number: int = 1) -> list[act.LearnerAction]:
        """A partner has our vector."""
        return self.take(ev.Uploaded(object=offer("a", to, round, number)))

    def refuse(self, refusal: str, to: str = "b", round: int = 0, number: int = 1) -> list[act.LearnerAction]:
        """A partner does not want it; without a name it cannot be reached."""
        name = offer("a", to, round, number)
        return self.take(ev.UploadFailed(object=name, reason=refusal or "no route", refusal=refusal))

    def meet(self, round: int = 0, number: int = 1) -> list[act.LearnerAction]:
        """A whole round with b; ends where the next one has begun."""
        self.stand(round)
        self.arrive(offer(round=round, number=number))
        self.acknowledge(round=round, number=number)
        return self.mix(round, 1.0)

    def among(self, members: str = "ab", **of_epoch: Any) -> "Peer":
        """Up to the first step of the first round."""
        self.training()
        self.hear(epoch(members, **of_epoch))
        return self


def slots(actions: list[Any]) -> list[int]:
    """The parts of the one mix among them."""
    (mix,) = posted(actions, box.Mix)
    return [place for place, _ in mix.parts]


def missed(actions: list[Any]) -> dict[str, str]:
    """What the report of a mixed round says of each partner; empty: it was mixed in."""
    (report,) = [a.message for a in of(actions, act.Say) if isinstance(a.message, msg.Boundary)]
    assert report.mixed is not None
    return {meeting.partner: meeting.missed for meeting in report.mixed.meetings}


class GossipDesk(Desk):
    """Plays all learners to a gossip hub."""

    def __init__(self, *names: str, num_learners: int | None = None, **changes: Any) -> None:
        budget = changes.pop("budget_tokens", 10**9)
        self.policy = gossip_policy(**changes)
        self.machine = SyncerMachine(
            self.policy, run=RUN, num_learners=num_learners or len(names), budget_tokens=budget
        )
        self.tape = MemoryTape()
        self.now = 0.0
        self.lines: dict[str, int] = {}
        self.sequences: dict[str, int] = {}
        self.last_line = 0
        for name in names:
            self.join(name, address=f"//{name}")
        if names:
            self.say(names[0], msg.Seeded(), finite=True, digests=self.digests([0]))
            for name in names:
                self.install(name)

    @property
    def gathering(self) -> Any:
        return self.machine.merging

    def epochs(self, name: str) -> list[msg.Epoch]:
        """All that a learner was told on its present connection."""
        return self.heard(name, msg.Epoch)

    def ended(
        self, name: str, round: int, met: str = "", missed: str = "", number: int = 1, **changes: Any
    ) -> list[act.SyncerAction]:
        """A learner reports the end of a round: whom it met, and who did not come."""
        meetings = [msg.Meeting(partner=n, distance=1.0) for n in met]
        meetings += [msg.Meeting(partner=n, missed="deadline") for n in missed]
        plain = {"epoch": number, "round": round, "meetings": meetings, "correction": 0.5 if met else 0.0}
        return self.boundary(name, mixed=msg.RoundMixed(**{**plain, **changes}))
