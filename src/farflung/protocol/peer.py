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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from farflung.core import mixing
from farflung.core.quorum import Ema
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import mailbox as box
from farflung.protocol import messages as msg
from farflung.protocol import objects

if TYPE_CHECKING:
    from farflung.protocol.learner import LearnerMachine

MAX_PARTNERS = 64  # of one round
MIN_WAIT_S = 0.2  # that a partner is waited for, at least
PATIENCE = 4.0  # a meeting may take so many times what meetings take on average
RETRY_S = (
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
)  # pauses before an offer that came too early is made again; the last repeats

EARLY = "early"  # refusals of an offer: not yet; try again
LATE = "late"  # the round has ended here
STRANGER = "stranger"  # no meeting of this name


_newest: tuple[list[msg.Peer], mixing.Members] = ([], mixing.Members(()))


def members_of(peers: list[msg.Peer]) -> mixing.Members:
    """Peers as the matchings want them. Learners that share a process often share the message, too."""
    global _newest
    if peers is not _newest[0]:
        names, mbps = tuple(p.name for p in peers), tuple(p.mbps for p in peers)
        _newest = (peers, mixing.Members(names=names, mbps=mbps))
    return _newest[1]


def slot(turn: int, place: int) -> int:
    """Downlink slot of a partner's vector. Slot 0 holds values to install; two turns may be on their way."""
    return 1 + 2 * place + turn % 2


@dataclass
class Partner:
    """The other side of one meeting."""

    peer: msg.Peer
    slot: int
    weight: float  # alpha M_ij
    arrived: bool = False
    sent: bool = False
    relayed: bool = False
    tries: int = 0
    missed: str = ""

    @property
    def met(self) -> bool:
        return self.arrived and self.sent

    @property
    def settled(self) -> bool:
        return self.met or bool(self.missed)


@dataclass
class Meeting:
    """One round of this learner."""

    epoch: int
    round: int
    ends_at: int  # own step
    partners: dict[str, Partner] = field(default_factory=dict)  # by name, sorted
    num_bytes: int = 0
    offered_s: float | None = None
    waits_since_s: float | None = None  # the trainer stands at the end of the round
    until_s: float | None = None
    mixing: bool = False  # the mix was posted


class PeerExchange:
    """One incarnation's rounds. It takes the place of `exchange.Exchange` where the topology is gossip."""

    def __init__(self, machine: LearnerMachine):
        self.machine, self.policy = machine, machine.policy
        self.held = [-1]  # newest consensus average that the hub announced: only its number matters
        self.epoch: msg.Epoch | None = None
        self.members: mixing.Members | None = None
        self.round = -1  # the last one begun
        self.turn = 0
        self.worked = (
            0  # steps of a round that a stop or a new sidecar broke off: the next one is shorter by them
        )
        self.meeting: Meeting | None = None
        self.awaited: dict[str, int] = {}  # objects that may be arriving, and their slots
        self.here: set[str] = set()  # those that have arrived
        self.relays: set[str] = set()  # those that come through the hub
        self.took_s = Ema()  # from standing at a round's end to its mix
        self.step_s = Ema()
        self.mbps: float | None = None
        self.misses: dict[str, int] = {}  # in a row, by partner
        self.moved = {
            "up": 0,
            "down": 0,
        }  # bytes straight to and from partners that the hub was not told of yet
        self.shown: box.Shown | None = None  # on its way to the hub
        self.last_round: int | None = None  # of the hand-in
        self.handed_in: msg.HandedIn | None = None  # once it was said
        self.contribution: msg.Contribute | None = None  # last said

    def validate(self) -> None:
        """Raise AssertionError on a broken invariant."""
        slots = [*self.awaited.values()]
        assert len(slots) == len(set(slots)), f"a slot is used twice: {self.awaited}"
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
        self._forget([o for o in self.awaited if self._next_slot(o) is None and not self._is_now(o)])
        if self.meeting is None:
            self._begin()
            return
        for name, partner in self.meeting.partners.items():
            if not partner.settled and self._index(name) is None:
                self._miss(partner, "lost")
        self._review()

    def _knows(self, message: msg.Epoch) -> bool:
        return self.epoch is not None and message.number <= self.epoch.number

    def _begin(self) -> None:
        """Begin a round: its partners are known, its end is ``H_i`` steps ahead."""
        if self.epoch is None or self.machine.phase != "training" or self.last_round is not None:
            return
        self.round = self._next_round
        self.turn += 1
        steps = max(0, self.policy.steps_of(self.machine.learner) - self.worked)
        self.worked = 0
        meeting = self.meeting = Meeting(self.epoch.number, self.round, self.machine.step + steps)
        meeting.partners = self._partners(self.round, self.turn)
        for object_name in self.here:
            partner = self._from(object_name)
            if partner is not None:
                partner.arrived = True
        if meeting.partners:
            at_step = meeting.ends_at - self.policy.overlap_steps
            self.machine.post(box.Snapshot(fragment=0, round=self.round, at_step=at_step))
        self._hold(meeting.ends_at, f"round {self.round}: waiting for {', '.join(meeting.partners)}")
        self._review()

    @property
    def _next_round(self) -> int:
        assert self.epoch is not None
        return max(self.round + 1, self.epoch.round)

    def _partners(self, round: int, turn: int) -> dict[str, Partner]:
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
        self._forget([o for o in self.awaited if self._is_now(o)])
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
        moved = self._take_moved()
        return msg.RoundMixed(
            epoch=meeting.epoch, round=meeting.round, meetings=meetings, correction=mixed.correction,
            mbps=self.mbps, bytes_up=moved["up"], bytes_down=moved["down"],
        )  # fmt: skip

    def _take_moved(self) -> dict[str, int]:
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
            self._review()
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
        self._forget([o for o in self.awaited if self._from(o) is partner])

    def _review(self) -> None:
        """Mix as soon as every meeting of the round has come about or has failed."""
        meeting = self.meeting
        if meeting is None or meeting.mixing or not all(p.settled for p in meeting.partners.values()):
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
        if self._is_contribution(object_name):
            self._contributed(object_name)
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
        self._review()

    def upload_failed(self, object_name: str, reason: str, refusal: str = "") -> None:
        """An offer came to nothing: too early, refused, or there is no way to the partner."""
        if self._is_contribution(object_name):
            self.machine.note("upload_failed", fragment=0, round=self.last_round, reason=reason)
            self._contributed(object_name)
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
            self._review()
        else:
            partner.relayed = True
            assert self.meeting is not None
            self._offer(self.meeting, partner)

    def _to(self, object_name: str) -> Partner | None:
        """The partner of the round under way that an object of ours is for, while it matters."""
        parsed, meeting = objects.parse_offer(object_name), self.meeting
        if (
            parsed is None
            or meeting is None
            or meeting.mixing
            or parsed[:2] != (meeting.epoch, meeting.round)
        ):
            return None
        partner = meeting.partners.get(parsed[3])
        return None if partner is None or partner.settled or partner.sent else partner

    # ---- their vectors -------------------------------------------------------------------------------

    def knocked(self, event: ev.Knocked) -> None:
        """A partner wants to send: give a slot, or the name of a refusal."""
        place = self._expect(event.object)
        if isinstance(place, str):
            self.machine.emit(act.Admit(object=event.object, slot=None, refusal=place))
        else:
            self.machine.emit(act.Admit(object=event.object, slot=place))

    def _expect(self, object_name: str) -> int | str:
        if object_name in self.awaited:
            return self.awaited[object_name]
        place = self._now_slot(object_name)
        if place is None:
            place = self._next_slot(object_name)
        if place is not None:
            self.awaited[object_name] = place
            return place
        return self._refusal(object_name)

    def _now_slot(self, object_name: str) -> int | None:
        """Its slot, if it belongs to the round under way and may still be mixed in."""
        partner = self._from(object_name)
        if (
            partner is None
            or self.meeting is None
            or self.meeting.mixing
            or partner.settled
            or partner.arrived
        ):
            return None
        return partner.slot

    def _next_slot(self, object_name: str) -> int | None:
        """Its slot, if it belongs to this learner's next round."""
        parsed = objects.parse_offer(object_name)
        if parsed is None or self.epoch is None or parsed[3] != self.machine.learner or self._is_over:
            return None
        if parsed[:2] != (self.epoch.number, self._next_round):
            return None
        partner = self._partners(self._next_round, self.turn + 1).get(parsed[2])
        return None if partner is None else partner.slot

    def _refusal(self, object_name: str) -> str:
        parsed = objects.parse_offer(object_name)
        if parsed is None or parsed[3] != self.machine.learner:
            return STRANGER
        if self._is_over:
            return LATE
        epoch, round = parsed[:2]
        known = -1 if self.epoch is None else self.epoch.number
        if epoch > known or (epoch == known and round > self._next_round):
            return EARLY
        if epoch == known and round == self._next_round:
            return STRANGER
        return LATE

    @property
    def _is_over(self) -> bool:
        """Whether this learner begins no round any more."""
        return self.last_round is not None or self.machine.phase in ("finishing", "saving", "ended")

    def _is_now(self, object_name: str) -> bool:
        """Whether an object belongs to the round under way."""
        parsed, meeting = objects.parse_offer(object_name), self.meeting
        return parsed is not None and meeting is not None and parsed[:2] == (meeting.epoch, meeting.round)

    def _from(self, object_name: str) -> Partner | None:
        """The partner of the round under way that an object comes from."""
        parsed = objects.parse_offer(object_name)
        if parsed is None or parsed[3] != self.machine.learner or not self._is_now(object_name):
            return None
        assert self.meeting is not None
        return self.meeting.partners.get(parsed[2])

    def arrived(self, event: ev.Arrived) -> None:
        """A partner's vector lies in its slot."""
        name = event.object
        if name not in self.relays:
            self.moved["down"] += event.num_bytes
        if name not in self.awaited:
            return
        if name in self.relays:
            self.relays.remove(name)
            self._answer_relay(name, "")
        self.here.add(name)
        partner = self._from(name)
        if partner is not None:
            partner.arrived = True
            self._review()

    def _forget(self, names: list[str]) -> None:
        """These slots are free again.

        What arrived whole is not disowned: its sender may ask once more whether it did.
        """
        for name in names:
            del self.awaited[name]
            self.relays.discard(name)
            if name in self.here:
                self.here.remove(name)
            else:
                self.machine.emit(act.Unexpect(object=name))

    # ---- through the hub -----------------------------------------------------------------------------

    def relay(self, message: msg.Relay) -> None:
        """A partner's vector lies at the hub."""
        place = self._expect(message.object)
        if isinstance(place, str):
            self._answer_relay(message.object, place)
        else:
            self.relays.add(message.object)
            self.machine.emit(act.FetchRelay(object=message.object, num_bytes=message.num_bytes, slot=place))

    def relay_failed(self, object_name: str, reason: str) -> None:
        """What lay at the hub could not be fetched."""
        if object_name in self.relays:
            self.relays.remove(object_name)
            self._answer_relay(object_name, reason)

    def relayed(self, message: msg.Relayed) -> None:
        """A partner fetched our vector from the hub, or does not want it."""
        if message.refusal:
            self.upload_failed(message.object, message.refusal, message.refusal)
            return
        partner = self._to(message.object)
        if partner is not None:
            self._sent(partner)

    def _answer_relay(self, object_name: str, refusal: str) -> None:
        parsed = objects.parse_offer(object_name)
        if parsed is not None:
            self.machine.say(msg.Relayed(partner=parsed[2], object=object_name, refusal=refusal))

    # ---- for the hub's consensus average -------------------------------------------------------------

    def announced(self, message: msg.Announce) -> None:
        """A newer average exists. A gossip learner keeps its own parameters."""
        self.held[0] = max(self.held[0], message.version)

    def invited(self, message: msg.Invite) -> None:
        """The hub asks for this learner's parameters, to average and to evaluate; training goes on."""
        if self.machine.phase == "training":
            self._show(message.round, final=False)

    def hand_in(self, versions: list[int], rounds: list[int]) -> None:
        """The budget is spent: the round under way ends here, and the live parameters are handed in."""
        if self.last_round is not None:
            return  # a repeat, after a reattachment
        self.last_round = rounds[0]
        self.held[0] = max(self.held[0], versions[0])
        self._leave()
        self._show(rounds[0], final=True)

    def _show(self, round: int, final: bool) -> None:
        if self.shown is not None:
            self.machine.emit(act.CancelUpload(object=self._contribution(self.shown.round)))
        self.shown = None
        self.machine.post(box.Show(round=round, final=final))

    def show(self, report: box.Shown) -> None:
        """The trainer wrote its parameters: upload them."""
        wanted = self.last_round is None or report.final
        if self.machine.incarnation is None or not wanted:
            return
        self.shown = report
        name = self._contribution(report.round)
        self.machine.emit(act.Upload(object=name, fragment=1, num_bytes=report.num_bytes))

    def _contribution(self, round: int) -> str:
        assert self.machine.incarnation is not None
        return objects.contribution(self.machine.learner, self.machine.incarnation, 0, round)

    @staticmethod
    def _is_contribution(object_name: str) -> bool:
        return object_name.startswith("contribution.")

    def _contributed(self, object_name: str) -> None:
        """The hub has our parameters, or will not have them."""
        shown = self.shown
        if shown is None or object_name != self._contribution(shown.round):
            return
        self.shown = None
        self.contribution = msg.Contribute(
            fragment=0, round=shown.round, base_version=self.held[0], steps=max(1, shown.steps),
            tokens=shown.tokens, num_bytes=shown.num_bytes,
        )  # fmt: skip
        self.machine.say(self.contribution)
        if shown.final and self.handed_in is None:
            moved = self._take_moved()
            self.handed_in = msg.HandedIn(bytes_up=moved["up"], bytes_down=moved["down"])
            self.machine.say(self.handed_in)

    def fate(self, message: msg.FateOf) -> None:
        """What became of our parameters at the hub: nothing here depends on it."""
        if self.contribution is not None and self.contribution.round == message.round:
            self.contribution = None

    # ---- link, stop, start over ----------------------------------------------------------------------

    def reattached(self) -> None:
        """The link is back: repeat what the hub may not have heard."""
        if self.contribution is not None:
            self.machine.say(self.contribution)
        if self.handed_in is not None:
            self.machine.say(self.handed_in)

    def resume(self, outstanding: list[box.Taken]) -> None:
        """Nothing of an earlier sidecar's rounds goes on."""

    def give_up(self) -> None:
        """The trainer saves: no round ends any more."""
        self._leave()

    def abandon(self) -> None:
        """This incarnation is over: nothing of it is sent or awaited any more; the next gets its own epoch."""
        self._leave()
        self.epoch = self.members = None
        if self.shown is not None:
            self.machine.emit(act.CancelUpload(object=self._contribution(self.shown.round)))
        self.shown = self.contribution = None
        self.worked = 0

    def _leave(self) -> None:
        """Leave the round under way; its partners miss us."""
        meeting, self.meeting = self.meeting, None
        if meeting is not None:
            for name, partner in meeting.partners.items():
                if not partner.settled and meeting.offered_s is not None:
                    self.machine.emit(act.CancelUpload(object=self._object(meeting, name)))
        self._forget([*self.awaited])
        self.machine.emit(act.SetTimer(name="meet", at_s=None))

    def fetch(self, p: int) -> None:
        """Nothing is fetched here: learners get vectors from their partners."""

    def fetched(self, p: int, version: int) -> None:
        """As `fetch`: an installation's download that came after it was given up."""

    def fetch_failed(self, event: ev.FetchFailed) -> None:
        """As `fetch`."""
