"""Vectors of a gossip learner's partners: which may come and into which slot, what is refused, which are here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import messages as msg
from farflung.protocol import objects
from farflung.protocol.meeting import EARLY, LATE, STRANGER

if TYPE_CHECKING:
    from farflung.protocol.peer import PeerExchange


class Arrivals:
    """What partners send, straight or through the hub, for the round under way or the next one."""

    def __init__(self, peer: PeerExchange):
        self.peer, self.machine = peer, peer.machine
        self.awaited: dict[str, int] = {}  # objects that may be arriving, and their slots
        self.here: set[str] = set()  # those that have arrived
        self.relays: set[str] = set()  # those that come through the hub

    def validate(self) -> None:
        """Raise AssertionError on a broken invariant."""
        slots = [*self.awaited.values()]
        assert len(slots) == len(set(slots)), f"a slot is used twice: {self.awaited}"

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
        partner = self.peer.sender(object_name)
        if (
            partner is None
            or self.peer.meeting is None
            or self.peer.meeting.mixing
            or partner.settled
            or partner.arrived
        ):
            return None
        return partner.slot

    def _next_slot(self, object_name: str) -> int | None:
        """Its slot, if it belongs to this learner's next round."""
        parsed = objects.parse_offer(object_name)
        if (
            parsed is None
            or self.peer.epoch is None
            or parsed[3] != self.machine.learner
            or self.peer.is_over
        ):
            return None
        if parsed[:2] != (self.peer.epoch.number, self.peer.next_round):
            return None
        partner = self.peer.partners(self.peer.next_round, self.peer.turn + 1).get(parsed[2])
        return None if partner is None else partner.slot

    def _refusal(self, object_name: str) -> str:
        parsed = objects.parse_offer(object_name)
        if parsed is None or parsed[3] != self.machine.learner:
            return STRANGER
        if self.peer.is_over:
            return LATE
        epoch, round = parsed[:2]
        known = -1 if self.peer.epoch is None else self.peer.epoch.number
        if epoch > known or (epoch == known and round > self.peer.next_round):
            return EARLY
        if epoch == known and round == self.peer.next_round:
            return STRANGER
        return LATE

    def arrived(self, event: ev.Arrived) -> None:
        """A partner's vector lies in its slot."""
        name = event.object
        if name not in self.relays:
            self.peer.moved["down"] += event.num_bytes
        if name not in self.awaited:
            return
        if name in self.relays:
            self.relays.remove(name)
            self._answer_relay(name, "")
        self.here.add(name)
        partner = self.peer.sender(name)
        if partner is not None:
            partner.arrived = True
            self.peer.review()

    def forget_strangers(self) -> None:
        """Who meets whom has changed: what belongs to no round any more is let go of."""
        self.forget(lambda name: self._next_slot(name) is None and not self.peer.is_now(name))

    def forget(self, gone: Callable[[str], bool]) -> None:
        """Free the slots of these objects.

        What arrived whole is not disowned: its sender may ask once more whether it did.
        """
        for name in [name for name in self.awaited if gone(name)]:
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

    def _answer_relay(self, object_name: str, refusal: str) -> None:
        parsed = objects.parse_offer(object_name)
        if parsed is not None:
            self.machine.say(msg.Relayed(partner=parsed[2], object=object_name, refusal=refusal))
