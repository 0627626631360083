"""A gossip learner's vectors on their way: straight to its partners, and in from them.

It listens where partners may dial it, asks the machine before a byte of a vector is taken, and keeps a client for
each partner. Nothing is served here.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from aiohttp import web

from farflung.errors import UserError
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import objects
from farflung.protocol.meeting import STRANGER
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
        self._clients: dict[str, tuple[str, HubClient]] = {}  # by partner, with its address
        self._outdated: list[HubClient] = []  # of partners that are dialled elsewhere now
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
        for client in [*self._outdated, *(client for _, client in self._clients.values())]:
            await client.close()
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
        try:
            await self._client(action.partner, action.address).put_object(action.object, vector)
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
        clients = [*self._outdated, *(client for _, client in self._clients.values())]
        sent, self._told[0] = self._told[0], sum(client.traffic.bytes_up for client in clients)
        return self._told[0] - sent

    def _received_bytes(self) -> int:
        """Counted at the transport since the last call."""
        received, self._told[1] = self._told[1], self.app[HUB].total.bytes_up
        return self._told[1] - received

    def _client(self, partner: str, address: str) -> HubClient:
        """Its client: kept, so that its connections are."""
        known = self._clients.get(partner)
        if known is not None and known[0] == address:
            return known[1]
        options = self._options
        if not may_dial(address, options.url):
            raise Gone(f"{address}: the join token does not travel in the clear in a run with TLS")
        if known is not None:  # a new process has its name
            self._outdated.append(known[1])
        client = faulty.make_partner_client(
            self._hub, address, options.token, self._run, self._dial_tls() if address[:5] == "https" else None,
            learner=options.learner, backoff_s=BACKOFF_S, dial_s=DIAL_PARTNER_S, redial=False,
        )  # fmt: skip
        self._clients[partner] = (address, client)
        return client

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
