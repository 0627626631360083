"""A gossip learner's vectors on their way: straight to its partners, and in from them.

It listens where partners may dial it, asks the machine before a byte of a vector is taken, and keeps a client for
each partner. Nothing is served here.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from farflung.errors import UserError
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import objects
from farflung.protocol.meeting import MAX_PARTNERS, STRANGER
from farflung.runtime import faulty
from farflung.runtime.client import DIAL_PARTNER_S, HubClient
from farflung.runtime.listen import may_dial, open_socket
from farflung.runtime.security import client_context, server_context
from farflung.runtime.server import HUB, make_inbox_app, start_on
from farflung.runtime.sidecar_config import SidecarConfig
from farflung.runtime.transport import Gone, Refused, TransportError

BACKOFF_S = (0.02, 0.1)  # before a damaged chunk is sent again; who does not answer is not dialled again
ENDED = "ended"  # refusal of an offer by a learner whose run is over
MAX_NAME = 300  # letters of an object's name: two learners' names and two numbers fit
MAX_WAYS = 2 * MAX_PARTNERS  # to partners, kept open: those of this round and the next


@dataclass
class Way:
    """To one partner."""

    address: str
    client: HubClient
    sending: int = 0


class Offers:
    """A `server.Receiver` for partners' vectors, and the way to theirs.

    Args:
        options: the sidecar's.
        hub: its client, whose link to the world carries partners' vectors too.
        slot: a downlink slot's bytes.
        size: object's name -> bytes of the vector.
        feed: tells the machine, which acts before it returns.
    """

    def __init__(
        self,
        options: SidecarConfig,
        hub: HubClient,
        slot: Callable[[int], memoryview],
        size: Callable[[str], int],
        feed: Callable[[ev.LearnerEvent], None],
    ) -> None:
        self._options, self._hub, self._slot, self._size, self._feed = options, hub, slot, size, feed
        self._run = options.run
        self._ways: dict[str, Way] = {}  # by partner, the one not used for longest first
        self._outdated: list[Way] = []  # to be closed once nothing is sent there
        self._sent_before = 0  # bytes, on ways that are closed
        self._context: ssl.SSLContext | None = None
        self._admitted: dict[str, act.Admit] = {}
        self._runner: web.AppRunner | None = None
        self.app = make_inbox_app(self, options.token, options.run)
        faulty.befall(hub, self.app)
        self._told = [0, 0]  # bytes sent to partners, and got from them, that the machine knows of
        self._socket: socket.socket | None = None
        self.address: str | None = None  # where partners may dial; None: they reach us through the hub
        self._serve_tls: ssl.SSLContext | None = None
        if options.listen is not None:
            with contextlib.suppress(OSError, UserError):
                self._serve_tls = self._tls()
                self._socket, self.address = open_socket(options.listen)

    async def start(self) -> None:
        """Answer who dials."""
        if self._socket is not None:
            self._runner = await start_on(self.app, self._socket, self._serve_tls)

    async def close(self) -> None:
        for way in [*self._outdated, *self._ways.values()]:
            await way.client.close()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._socket is not None:
            self._socket.close()

    def begun(self, run: str) -> None:
        """The run that took this learner in: who belongs to another is turned away, here and there."""
        self._run = self.app[HUB].run_id = run

    def _tls(self) -> ssl.SSLContext | None:
        options = self._options
        if options.listen is None or not options.listen.tls:
            return None
        assert options.cert is not None and options.key is not None
        return server_context(options.cert, options.key)

    # ---- sending -------------------------------------------------------------------------------------

    async def send(self, action: act.Offer, vector: memoryview) -> ev.LearnerEvent:
        """Send our vector to a partner; returns what became of it.

        With it goes what was sent to all partners since the last time: what a cancelled offer had sent counts too.
        """
        began_s = asyncio.get_running_loop().time()
        await self._close_outdated()
        try:
            way = self._way(action.partner, action.address)
            way.sending += 1
            try:
                await way.client.put_object(action.object, vector)
            finally:
                way.sending -= 1
        except Refused as error:
            refusal = error.reason
            return ev.UploadFailed(
                object=action.object, reason=str(error), refusal=refusal, sent_bytes=self._sent_bytes()
            )
        except (TransportError, UserError) as error:  # UserError: the TLS files are gone
            return ev.UploadFailed(object=action.object, reason=str(error), sent_bytes=self._sent_bytes())
        took_s = asyncio.get_running_loop().time() - began_s
        return ev.Uploaded(object=action.object, transfer_s=took_s, sent_bytes=self._sent_bytes())

    def _sent_bytes(self) -> int:
        """Counted at the transport since the last call."""
        ways = [*self._outdated, *self._ways.values()]
        now = self._sent_before + sum(way.client.traffic.bytes_up for way in ways)
        sent, self._told[0] = self._told[0], now
        return now - sent

    def _received_bytes(self) -> int:
        """Counted at the transport since the last call."""
        received, self._told[1] = self._told[1], self.app[HUB].total.bytes_up
        return self._told[1] - received

    async def _close_outdated(self) -> None:
        """Let go of clients that are not needed any more; what they sent still counts."""
        for way in [way for way in self._outdated if not way.sending]:
            self._outdated.remove(way)
            self._sent_before += way.client.traffic.bytes_up
            await way.client.close()

    def _way(self, partner: str, address: str) -> Way:
        """Its client: kept, so that its connections are."""
        known = self._ways.pop(partner, None)
        if known is not None and known.address == address:
            self._ways[partner] = known
            return known
        if known is not None:  # a new process has its name
            self._outdated.append(known)
        options = self._options
        if not may_dial(address, options.url):
            raise Gone(f"{address}: the join token does not travel in the clear in a run with TLS")
        client = faulty.make_partner_client(
            self._hub, address, options.token, self._run, self._dial_tls() if address[:5] == "https" else None,
            learner=options.learner, backoff_s=BACKOFF_S, dial_s=DIAL_PARTNER_S, redial=False,
        )  # fmt: skip
        self._ways[partner] = Way(address, client)
        if len(self._ways) > MAX_WAYS:
            self._outdated.append(self._ways.pop(next(iter(self._ways))))
        return self._ways[partner]

    def _dial_tls(self) -> ssl.SSLContext:
        if self._context is None:
            self._context = client_context(self._options.ca, self._options.cert, self._options.key)
        return self._context

    # ---- receiving (server.Receiver) -----------------------------------------------------------------

    def buffer_for(self, name: str, total_bytes: int) -> memoryview:
        """The slot that the machine gives for a partner's vector.

        Raises:
            Gone: it is for another learner, which is not here.
            Refused: it is no vector, or the machine does not want it, by the machine's own name for that.
        """
        parsed = objects.parse_offer(name) if len(name) <= MAX_NAME else None
        if parsed is None:
            raise Refused(STRANGER, f"{name[:MAX_NAME]}: no vector of a round")
        if parsed[3] != self._options.learner:
            raise Gone(f"{name}: this is {self._options.learner}")
        if total_bytes != self._size(name):
            raise Refused("size", f"{name}: {total_bytes} bytes, {self._size(name)} expected")
        self._feed(ev.Knocked(object=name))
        admit = self._admitted.pop(name, act.Admit(object=name, slot=None, refusal=ENDED))
        if admit.slot is None:
            raise Refused(admit.refusal, f"{name}: not now")
        return self._slot(admit.slot)[:total_bytes]

    def admit(self, action: act.Admit) -> None:
        """The machine's answer to a knock."""
        self._admitted[action.object] = action

    def complete(self, name: str) -> None:
        self._feed(ev.Arrived(object=name, num_bytes=self._received_bytes()))

    def refused(self, reason: str, detail: str) -> None:
        """Its sender was told; the machine knows what it turned away itself."""

    def unexpect(self, name: str) -> None:
        """Nothing of this object is written any more."""
        self.app[HUB].inbox.forget(name)
