"""Vectors that go straight from one virtual island to another, or through the hub."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farflung.core.traffic import framed_bytes
from farflung.lab.virtual_time import What
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import objects
from farflung.protocol.meeting import LATE

if TYPE_CHECKING:
    from farflung.lab.island import VirtualIsland


class Offers:
    """What an island's sidecar does with its own and its partners' vectors.

    Args:
        island: whose.
    """

    def __init__(self, island: VirtualIsland) -> None:
        self._island = island
        self.admitted: act.Admit  # the answer to the last knock
        self.incoming: dict[str, What] = {}  # objects on their way here: how to end that

    # ---- sending -------------------------------------------------------------------------------------

    def offer(self, action: act.Offer) -> None:
        """Knock; if the partner wants it, send. Refusals come back after the way there and back."""
        island, run = self._island, self._island.run
        partner = run.island(action.partner)
        latency_s = max(run.control_s(island), run.control_s(partner))
        data = island.trainer.read(0, seed=False)[: action.num_bytes]

        def knock() -> None:
            if action.object in island.cancelled:
                return
            if not self._reaches(partner):
                self._fail(action.object, "unreachable", "", latency_s)
                return
            partner.when_awake(answer)

        def answer() -> None:
            refusal = partner.offers.knock(action.object)
            if refusal:
                self._fail(action.object, refusal, refusal, latency_s)
                return
            partner.offers.incoming[action.object] = cut
            send()

        def send() -> None:
            took_s = run.pair_bulk_s(action.object, island, partner, len(data))
            island.in_flight["up"].begin(action.object, len(data), run.now, took_s)
            island.later(took_s, lambda: partner.when_awake(arrive))

        def cut() -> None:
            """The partner lets go of it."""
            self._passed(action.object, partner)
            run.release(action.object, island, partner)
            self._fail(action.object, LATE, LATE, latency_s)

        def arrive() -> None:
            if partner.offers.incoming.pop(action.object, None) is None or action.object in island.cancelled:
                return
            self._passed(action.object, partner)
            run.release(action.object, island, partner)
            if not self._reaches(partner):
                self._fail(action.object, "unreachable", "", latency_s)
                return
            if island.trouble.spoils("up"):  # its checksum is wrong: once more
                partner.offers.incoming[action.object] = cut
                send()
                return
            if partner.offers.take(action.object, data):
                island.later(latency_s, acknowledged)
            else:
                self._fail(action.object, LATE, LATE, latency_s)

        def acknowledged() -> None:
            if self._reaches(partner):
                island.feed(ev.Uploaded(object=action.object, sent_bytes=framed_bytes(len(data))))
            else:  # it has the vector, and we do not know
                self._fail(action.object, "unreachable", "", 0.0)

        island.later(latency_s, knock)

    def cancel(self, object_name: str) -> None:
        """Nothing more of this offer is sent."""
        offer = objects.parse_offer(object_name)
        if offer is not None:
            partner = self._island.run.island(offer[3])
            partner.offers.incoming.pop(object_name, None)
            self._passed(object_name, partner)
            self._island.run.release(object_name, self._island, partner)

    def _passed(self, object_name: str, partner: VirtualIsland) -> None:
        """It has arrived, or is given up: what has passed of it is counted at both ends."""
        island = self._island
        passed = island.in_flight["up"].end(object_name, island.run.now)
        if passed:
            island.run.count(island, "up", object_name, passed)
            island.run.count(partner, "down", object_name, passed)

    def _reaches(self, partner: VirtualIsland) -> bool:
        run, island = self._island.run, self._island
        dead = island.trouble.dead(run.now) or partner.trouble.dead(run.now)
        return partner.alive and not dead and frozenset((island.name, partner.name)) not in run.walls

    def _fail(self, object_name: str, reason: str, refusal: str, after_s: float) -> None:
        island = self._island
        event = ev.UploadFailed(object=object_name, reason=reason, refusal=refusal)
        island.later(after_s, lambda: None if object_name in island.cancelled else island.feed(event))

    # ---- receiving -----------------------------------------------------------------------------------

    def knock(self, object_name: str) -> str:
        """Ask whether a vector is wanted; the name of its refusal, or nothing."""
        self.admitted = act.Admit(object=object_name, slot=None, refusal="unreachable")
        self._island.feed(ev.Knocked(object=object_name))
        return self.admitted.refusal

    def unexpect(self, object_name: str) -> None:
        """An object is not wanted any more."""
        cut = self.incoming.pop(object_name, None)
        if cut is not None:
            cut()

    def take(self, object_name: str, data: bytes) -> bool:
        """Put a vector into its slot; False if it is not wanted any more."""
        island = self._island
        place = island.machine.peer.arrivals.awaited.get(object_name) if island.alive else None
        if place is None:
            return False
        island.trainer.write(place, memoryview(data))
        island.feed(ev.Arrived(object=object_name, num_bytes=framed_bytes(len(data))))
        return True

    def fetch(self, action: act.FetchRelay) -> None:
        """Fetch what a partner left at the hub."""
        island = self._island
        data = island.run.objects.get(action.object)
        if data is None or not island.run.reachable(island):
            island.feed(ev.RelayFailed(object=action.object, reason="gone"))
        elif self.take(action.object, data):
            island.run.count(island, "down", action.object, len(data))
