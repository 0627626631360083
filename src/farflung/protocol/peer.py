"""A gossip learner's traffic: rounds of meetings with partners of its own, and no hub between them.

A round is H_i inner steps, a vector offered to each partner, and a mix. Who meets whom is a pure function of the
epoch's seed and members and of the round, so both sides name the same (epoch, round, pair) or do not meet.
A partner is mixed in when its vector has arrived here *and* ours was acknowledged there: then both sides take
equal and opposite corrections, and the mean of all learners stays where it was. Whatever keeps a partner away
(death, a refusal, the deadline) is a missed meeting: the round ends without it, and nobody hangs.

Epochs come from the hub, which knows who is there; it sees no vector but those that it relays, and learners go on
without it in the last epoch. An epoch takes effect at a learner's next round, which is then at least `round`: so
it also brings the rounds of all learners together again.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from farflung.core import mixing
from farflung.core.quorum import Ema
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import mailbox as box
from farflung.protocol import messages as msg
from farflung.protocol import objects
from farflung.protocol.arrivals import Arrivals
from farflung.protocol.meeting import EARLY, MAX_PARTNERS, Meeting, Partner, members_of, slot
from farflung.protocol.showing import Showing

if TYPE_CHECKING:
    from farflung.protocol.learner import LearnerMachine

MIN_WAIT_S = 0.2  # that a partner is waited for, at least
PATIENCE = 4.0  # a meeting may take so many times what meetings take on average
RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.5)  # pauses before what came too early is offered again; the last repeats


class PeerExchange:
    """One incarnation's rounds. It takes the place of `exchange.Exchange` where the topology is gossip."""

    def __init__(self, machine: LearnerMachine):
        self.machine, self.policy = machine, machine.policy
        self.held = [-1]  # newest consensus average that the hub announced: only its number matters
        self.epoch: msg.Epoch | None = None
        self.members: mixing.Members | None = None
        self.round = -1  # the last one begun
        self.turn = 0
        self.worked = 0  # steps of a round that was broken off: the next one is shorter by them
        self.meeting: Meeting | None = None
        self.took_s = Ema()  # from standing at a round's end to its mix
        self.step_s = Ema()
        self.mbps: float | None = None
        self.misses: dict[str, int] = {}  # in a row, by partner
        self.moved = {"up": 0, "down": 0}  # bytes between partners that the hub was not told of yet
        self.arrivals, self.showing = Arrivals(self), Showing(self)

    def validate(self) -> None:
        """Raise AssertionError on a broken invariant."""
        self.arrivals.validate()
        meeting = self.meeting
        if meeting is not None and meeting.waits_since_s is not None and not meeting.mixing:
            assert meeting.until_s is not None, f"round {meeting.round} waits without a deadline"

    # ---- rounds --------------------------------------------------------------------------------------

    def start(self, versions: list[int], step: int, syncer_step: int) -> None:
        """The trainer holds parameters and begins to train, as soon as it knows with whom."""
        self.held, self.meeting = list(versions), None
        self._hold(step, "waiting for partners")
        self._begin()

    def told(self, message: msg.Epoch) -> None:
        """Who may meet whom from the next round on; who is no longer there is not waited for.

        A repeat changes nothing, nor does one that was meant for an earlier life of this learner.
        """
        if self.machine.phase != "training" or self._knows(message):
            return
        self.epoch, self.members = message, members_of(message.members)
        self.misses = {name: n for name, n in self.misses.items() if self._index(name) is not None}
        self.arrivals.forget_strangers()
        if self.meeting is None:
            self._begin()
            return
        for name, partner in self.meeting.partners.items():
            if not partner.settled and self._index(name) is None:
                self._miss(partner, "lost")
        self.review()

    def _knows(self, message: msg.Epoch) -> bool:
        return self.epoch is not None and message.number <= self.epoch.number

    def _begin(self) -> None:
        """Begin a round: its partners are known, its end is ``H_i`` steps ahead."""
        if self.epoch is None or self.machine.phase != "training" or self.showing.last_round is not None:
            return
        self.round = self.next_round
        self.turn += 1
        steps = max(0, self.policy.steps_of(self.machine.learner) - self.worked)
        self.worked = 0
        meeting = self.meeting = Meeting(self.epoch.number, self.round, self.machine.step + steps)
        meeting.partners = self.partners(self.round, self.turn)
        for object_name in self.arrivals.here:
            partner = self.sender(object_name)
            if partner is not None:
                partner.arrived = True
        if meeting.partners:
            at_step = meeting.ends_at - self.policy.overlap_steps
            self.machine.post(box.Snapshot(fragment=0, round=self.round, at_step=at_step))
        self._hold(meeting.ends_at, f"round {self.round}: waiting for {', '.join(meeting.partners)}")
        self.review()

    @property
    def next_round(self) -> int:
        """The number of the round that begins after this one."""
        assert self.epoch is not None
        return max(self.round + 1, self.epoch.round)

    def partners(self, round: int, turn: int) -> dict[str, Partner]:
        """Whom this learner meets in a round of the newest epoch, sorted by name; nobody if it is no member."""
        assert self.epoch is not None and self.members is not None
        index = self._index(self.machine.learner)
        if index is None:
            return {}
        matching = mixing.fitting(self.policy.matching, len(self.members), MAX_PARTNERS)
        found = mixing.partners(matching, self.epoch.seed, round, self.members, index)
        peers = self.epoch.members
        return {
            peers[j].name: Partner(peers[j], slot(turn, place), self.policy.mixing * weight)
            for place, (j, weight) in enumerate(found)
        }

    def _index(self, name: str) -> int | None:
        """A member's place in the newest epoch."""
        assert self.members is not None
        names = self.members.names
        index = bisect_left(names, name)
        return index if index < len(names) and names[index] == name else None

    def _hold(self, step: int, reason: str) -> None:
        self.machine.post(box.RunUntil(step=step, reason=reason))

    def boundary(self, report: box.BoundaryPassed) -> None:
        """The trainer passed a boundary: it may have offered, ended a round, or stand and wait."""
        if report.tokens:
            self.step_s = self.step_s.update(report.step_s)
        for taken in report.taken:
            self._offered(taken)
        if report.mixed is not None and self.meeting is not None and report.mixed.round == self.meeting.round:
            self._ended(self.meeting)
        meeting = self.meeting
        if meeting is not None and report.step >= meeting.ends_at and not meeting.mixing:
            self._stand(meeting)

    def _ended(self, meeting: Meeting) -> None:
        if meeting.waits_since_s is not None and any(p.met for p in meeting.partners.values()):
            self.took_s = self.took_s.update(self.machine.now - meeting.waits_since_s)
        self.arrivals.forget(self.is_now)
        self.machine.emit(act.SetTimer(name="meet", at_s=None))
        self.meeting = None
        self._begin()

    def round_mixed(self, mixed: box.Mixed) -> msg.RoundMixed | None:
        """The end of a round as the hub is told of it."""
        meeting = self.meeting
        if meeting is None or meeting.round != mixed.round:
            return None
        distances = iter(mixed.distances)
        meetings = []
        for name, partner in meeting.partners.items():
            distance = next(distances) if partner.met else 0.0
            missed = "not_finite" if distance is None else partner.missed
            meetings.append(msg.Meeting(partner=name, missed=missed, distance=distance or 0.0))
            self.misses[name] = self.misses.get(name, 0) + 1 if missed else 0
        moved = self.take_moved()
        return msg.RoundMixed(
            epoch=meeting.epoch, round=meeting.round, meetings=meetings, correction=mixed.correction,
            mbps=self.mbps, bytes_up=moved["up"], bytes_down=moved["down"],
        )  # fmt: skip

    def take_moved(self) -> dict[str, int]:
        """Bytes between partners that the hub is told of now."""
        moved, self.moved = self.moved, {"up": 0, "down": 0}
        return moved

    # ---- waiting -------------------------------------------------------------------------------------

    def _stand(self, meeting: Meeting) -> None:
        """The trainer has done its steps: from now on a deadline runs."""
        if meeting.waits_since_s is None:
            meeting.waits_since_s = self.machine.now
            meeting.until_s = self.machine.now + self._patience_s(meeting)
            self.machine.emit(act.SetTimer(name="meet", at_s=meeting.until_s))

    def _patience_s(self, meeting: Meeting) -> float:
        """How long partners are waited for.

        By default four times what meetings took on average, at least a round's steps (a partner may be that far
        behind), doubled for a partner that was missed the last times, and never above the lease.
        """
        if self.policy.exchange_s is not None:
            return self.policy.exchange_s
        longest = self.policy.lease_s
        if self.took_s.value is None:
            return longest
        round_s = self.policy.steps_of(self.machine.learner) * (self.step_s.value or 0.0)
        usual = max(MIN_WAIT_S, round_s, PATIENCE * self.took_s.value)
        missed = max((self.misses.get(name, 0) for name in meeting.partners), default=0)
        return float(min(longest, usual * 2 ** min(missed, 10)))

    def timer(self, name: str, rest: str) -> None:
        """The deadline of a round, or the time to make an offer again."""
        meeting = self.meeting
        if meeting is None or meeting.mixing:
            return
        if name == "meet" and meeting.until_s is not None:
            for partner in meeting.partners.values():
                if not partner.settled:
                    self._miss(partner, "deadline")
            self.review()
        elif name == "offer":
            round, _, to = rest.partition(".")  # one that was set in an earlier round has no say in this
            if round == str(meeting.round) and not meeting.partners[to].settled:
                self._offer(meeting, meeting.partners[to])

    def _miss(self, partner: Partner, why: str) -> None:
        """Nothing comes of this meeting; its vector is let go of."""
        assert self.meeting is not None
        partner.missed = why
        name = partner.peer.name
        if not partner.sent and self.meeting.offered_s is not None:
            self.machine.emit(act.CancelUpload(object=self._object(self.meeting, name)))
        self.arrivals.forget(lambda name: self.sender(name) is partner)

    def review(self) -> None:
        """Mix as soon as every meeting of the round has come about or has failed."""
        meeting = self.meeting
        if meeting is None or meeting.mixing or not meeting.settled:
            return
        meeting.mixing = True
        parts = [(p.slot, p.weight) for p in meeting.partners.values() if p.met]
        self.machine.post(box.Mix(round=meeting.round, parts=parts, at_step=meeting.ends_at))

    # ---- our vector ----------------------------------------------------------------------------------

    def _object(self, meeting: Meeting, partner: str) -> str:
        return objects.offer(meeting.epoch, meeting.round, self.machine.learner, partner)

    def _offered(self, taken: box.Taken) -> None:
        meeting = self.meeting
        if meeting is None or taken.round != meeting.round or meeting.mixing:
            return
        if not taken.finite:
            self.machine.start_over("its own parameters are not finite")
            return
        meeting.offered_s, meeting.num_bytes = self.machine.now, taken.num_bytes
        for partner in meeting.partners.values():
            if not partner.settled:
                self._offer(meeting, partner)

    def _offer(self, meeting: Meeting, partner: Partner) -> None:
        """Send our vector: directly, or through the hub to whom nobody can dial."""
        name, peer = self._object(meeting, partner.peer.name), partner.peer
        if peer.address is None or partner.relayed:
            partner.relayed = True
            self.machine.emit(act.Upload(object=name, fragment=0, num_bytes=meeting.num_bytes))
        else:
            self.machine.emit(
                act.Offer(object=name, partner=peer.name, address=peer.address, num_bytes=meeting.num_bytes)
            )

    def uploaded(self, object_name: str) -> None:
        """A partner acknowledged our vector, or the hub did: then it is told to fetch it."""
        if self.showing.is_ours(object_name):
            self.showing.uploaded(object_name)
            return
        partner = self._to(object_name)
        if partner is None:
            return
        if partner.relayed:
            assert self.meeting is not None
            self.machine.say(
                msg.Relay(partner=partner.peer.name, object=object_name, num_bytes=self.meeting.num_bytes)
            )
            return
        self._sent(partner)

    def _sent(self, partner: Partner) -> None:
        meeting = self.meeting
        assert meeting is not None and meeting.offered_s is not None
        partner.sent = True
        took_s = self.machine.now - meeting.offered_s
        if took_s > 0 and not partner.tries:
            seen = 8e-6 * meeting.num_bytes / took_s
            self.mbps = seen if self.mbps is None else 0.5 * (self.mbps + seen)
        self.review()

    def upload_failed(self, object_name: str, reason: str, refusal: str = "") -> None:
        """An offer came to nothing: too early, refused, or there is no way to the partner."""
        if self.showing.is_ours(object_name):
            self.machine.note("upload_failed", fragment=0, round=self.showing.last_round, reason=reason)
            self.showing.uploaded(object_name)
            return
        partner = self._to(object_name)
        if partner is None:
            return
        if refusal == EARLY:
            pause_s = RETRY_S[min(partner.tries, len(RETRY_S) - 1)]
            partner.tries += 1
            assert self.meeting is not None
            timer = f"offer.{self.meeting.round}.{partner.peer.name}"
            self.machine.emit(act.SetTimer(name=timer, at_s=self.machine.now + pause_s))
        elif refusal or partner.relayed or not self.machine.attached:
            self._miss(partner, refusal or "unreachable")
            self.review()
        else:
            partner.relayed = True
            assert self.meeting is not None
            self._offer(self.meeting, partner)

    def relayed(self, message: msg.Relayed) -> None:
        """A partner fetched our vector from the hub, or does not want it."""
        if message.refusal:
            self.upload_failed(message.object, message.refusal, message.refusal)
            return
        partner = self._to(message.object)
        if partner is not None:
            self._sent(partner)

    def _to(self, object_name: str) -> Partner | None:
        """The partner of the round under way that an object of ours is for, while it matters."""
        parsed, meeting = objects.parse_offer(object_name), self.meeting
        if parsed is None or meeting is None or meeting.mixing or not self.is_now(object_name):
            return None
        partner = meeting.partners.get(parsed[3])
        return None if partner is None or partner.settled or partner.sent else partner

    # ---- which round an object belongs to ------------------------------------------------------------

    def is_now(self, object_name: str) -> bool:
        """Whether it belongs to the round under way."""
        parsed, meeting = objects.parse_offer(object_name), self.meeting
        return parsed is not None and meeting is not None and parsed[:2] == (meeting.epoch, meeting.round)

    def sender(self, object_name: str) -> Partner | None:
        """The partner of the round under way that it comes from."""
        parsed = objects.parse_offer(object_name)
        if parsed is None or parsed[3] != self.machine.learner or not self.is_now(object_name):
            return None
        assert self.meeting is not None
        return self.meeting.partners.get(parsed[2])

    @property
    def is_over(self) -> bool:
        """Whether this learner begins no round any more."""
        return self.showing.last_round is not None or self.machine.phase in ("finishing", "saving", "ended")

    # ---- for the hub's consensus average -------------------------------------------------------------

    def announced(self, message: msg.Announce) -> None:
        """A newer average exists. A gossip learner keeps its own parameters."""
        self.held[0] = max(self.held[0], message.version)

    def invited(self, message: msg.Invite) -> None:
        """The hub asks for this learner's parameters, to average and to evaluate; training goes on."""
        if self.machine.phase == "training":
            self.showing.ask(message.round, final=False)

    def hand_in(self, versions: list[int], rounds: list[int]) -> None:
        """The budget is spent: the round under way ends here, and the live parameters are handed in."""
        if self.showing.last_round is not None:
            return  # a repeat, after a reattachment
        self.showing.last_round = rounds[0]
        self.held[0] = max(self.held[0], versions[0])
        self._leave()
        self.showing.ask(rounds[0], final=True)

    def fate(self, message: msg.FateOf) -> None:
        """What became of our parameters at the hub."""
        self.showing.fate(message)

    # ---- link, stop, start over ----------------------------------------------------------------------

    def reattached(self) -> None:
        """The link is back: repeat what the hub may not have heard."""
        self.showing.reattached()

    def resume(self, outstanding: list[box.Taken]) -> None:
        """Nothing of an earlier sidecar's rounds goes on."""

    def give_up(self) -> None:
        """The trainer saves: no round ends any more."""
        self._leave()

    def abandon(self) -> None:
        """This incarnation is over: nothing of it is sent or awaited any more; the next gets its own epoch."""
        self._leave()
        self.epoch = self.members = None
        self.showing.abandon()
        self.worked = 0

    def _leave(self) -> None:
        """Leave the round under way; its partners miss us."""
        meeting, self.meeting = self.meeting, None
        if meeting is not None:
            for name, partner in meeting.partners.items():
                if not partner.settled and meeting.offered_s is not None:
                    self.machine.emit(act.CancelUpload(object=self._object(meeting, name)))
        self.arrivals.forget(lambda name: True)
        self.machine.emit(act.SetTimer(name="meet", at_s=None))

    def fetch(self, p: int) -> None:
        """Nothing is fetched here: learners get vectors from their partners."""

    def fetched(self, p: int, version: int) -> None:
        """As `fetch`: an installation's download that came after it was given up."""

    def fetch_failed(self, event: ev.FetchFailed) -> None:
        """As `fetch`."""
