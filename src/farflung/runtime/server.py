"""The hub's one port: control WebSocket, bulk objects, and whatever JSON routes the caller adds.

Every request needs the join token. A refusal is a status and one JSON line {"reason", "detail"}, told to the
backend; a malformed request costs only itself. The backend decides; this file only moves bytes.
"""

import asyncio
import errno
import hmac
import itertools
import logging
import socket
import ssl
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

import aiohttp
from aiohttp import web

from farflung.errors import UserError
from farflung.protocol import wire
from farflung.protocol.byte_table import ByteTable
from farflung.protocol.messages import LearnerMessage
from farflung.runtime import bulk, chunks
from farflung.runtime.inbox import Inbox, Slot
from farflung.runtime.link import CLOSE_S, HEARTBEAT_S, Link
from farflung.runtime.transport import (
    ARRIVED_HEADER,
    DETAIL_HEADER,
    LEARNER_HEADER,
    REASON_HEADER,
    RUN_HEADER,
    Gone,
    Refused,
    Traffic,
    one_line,
    ranges,
)

STALL_S = 60.0  # without one byte of a body, after which its request ends

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
LearnerLink = Link[LearnerMessage]


class Receiver(Protocol):
    """Who takes objects in. Methods return at once."""

    def buffer_for(self, name: str, total_bytes: int) -> memoryview | None:
        """Where an arriving object goes, `total_bytes` bytes; None, or raise Refused, to turn it away."""

    def complete(self, name: str) -> None:
        """Every chunk arrived and was checked. May raise Refused."""

    def refused(self, reason: str, detail: str) -> None:
        """Somebody was turned away: token, run, frame, or a reason of the backend's own."""


class Backend(Receiver, Protocol):
    """What the hub asks of the run behind it. Plain methods return at once; the others may wait."""

    def source(self, name: str) -> memoryview:
        """The bytes of an object, unchanged while it is served; KeyError when it is gone."""

    async def connected(self, connection: int, link: LearnerLink) -> None: ...

    async def message(self, connection: int, message: LearnerMessage) -> None:
        """One message; the next one of the same connection waits until this returns."""

    async def disconnected(self, connection: int, reason: str) -> None:
        """Once for each `connected`."""


class Hub:
    """State of the transport: links, arriving objects, counters. Found as `app[HUB]`.

    Attributes:
        body: what is read as the body of a request; bad weather puts something in between.
    """

    def __init__(self, backend: Receiver, token: str, run_id: str | None, heartbeat_s: float) -> None:
        self.backend = backend
        self.run_id = run_id
        self.heartbeat_s = heartbeat_s
        self.inbox = Inbox(backend.buffer_for, backend.complete)
        self.links: dict[int, LearnerLink] = {}
        self.total = Traffic()
        self.by_learner: defaultdict[str, Traffic] = defaultdict(Traffic)
        self.table = ByteTable()  # of data
        self.heard_s: dict[str, float] = {}  # learner -> loop time of its last authenticated byte
        self.connections = itertools.count(1)
        self.body: Callable[[web.Request], Any] = lambda request: request.content
        self._bearer = f"Bearer {token}".encode()

    def authorize(self, request: web.Request) -> None:
        """Raise Refused unless the request carries the join token, and no other run's id."""
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._bearer):
            raise Refused("token", "the join token is missing or wrong")
        run = request.headers.get(RUN_HEADER)
        if run is not None and self.run_id is not None and run != self.run_id:
            raise Refused("run", f"run {run!r} is not served here")

    def count(self, request: web.Request, *, up: int = 0, down: int = 0, control: int = 0) -> None:
        learner = request.headers.get(LEARNER_HEADER, "")
        for traffic in (self.total, self.by_learner[learner]):
            traffic.bytes_up += up
            traffic.bytes_down += down
            traffic.bytes_control += control
        if up or down:
            self.table.count(learner, request.match_info.get("name", ""), up=up, down=down)
        self.heard_s[learner] = asyncio.get_running_loop().time()


HUB = web.AppKey("hub", Hub)
BACKEND = web.AppKey("backend", Backend)
OBJECT_PATH = r"/objects/{name}/{index:\d+}"


def make_app(
    backend: Backend,
    token: str,
    run_id: str | None = None,
    extra_routes: Iterable[web.AbstractRouteDef] = (),
    *,
    heartbeat_s: float = HEARTBEAT_S,
) -> web.Application:
    """The hub as an aiohttp application; its state is `app[HUB]`.

    Args:
        backend: decides about objects and answers messages.
        token: the join token that every request must carry.
        run_id: when given, requests that name another run are refused.
        extra_routes: more routes, such as `web.get("/status", handler)`, behind the same token.
        heartbeat_s: between WebSocket pings.
    """
    app = make_inbox_app(backend, token, run_id, heartbeat_s=heartbeat_s)
    app[BACKEND] = backend
    app.add_routes(
        [
            web.get("/ws", _control),
            web.get(OBJECT_PATH, _serve, allow_head=False),
            *extra_routes,
        ]
    )
    app.on_shutdown.append(_close_links)
    return app


def make_inbox_app(
    receiver: Receiver, token: str, run_id: str | None = None, *, heartbeat_s: float = HEARTBEAT_S
) -> web.Application:
    """Only the part that takes objects in: what a gossip learner shows its partners."""
    app = web.Application(middlewares=[_guard])
    app[HUB] = Hub(receiver, token, run_id, heartbeat_s)
    app.add_routes([web.put(OBJECT_PATH, _receive), web.head("/objects/{name}", _arrived)])
    return app


async def start(
    app: web.Application, host: str, port: int = 0, ssl_context: ssl.SSLContext | None = None
) -> tuple[web.AppRunner, int]:
    """Listen. Returns the runner (`await runner.cleanup()` ends everything) and the actual port.

    Raises:
        UserError: the address cannot be had.
    """
    runner = await _runner(app)
    try:
        await web.TCPSite(runner, host, port, ssl_context=ssl_context).start()
    except OSError as error:
        await runner.cleanup()
        raise unusable(host, port, error) from None
    return runner, int(runner.addresses[0][1])


async def start_on(
    app: web.Application, sock: socket.socket, ssl_context: ssl.SSLContext | None = None
) -> web.AppRunner:
    """As `start`, on a socket that listens already."""
    runner = await _runner(app)
    await web.SockSite(runner, sock, ssl_context=ssl_context).start()
    return runner


async def _runner(app: web.Application) -> web.AppRunner:
    runner = web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        read_bufsize=bulk.READ_BUFFER_BYTES,
        shutdown_timeout=CLOSE_S,
        lingering_time=CLOSE_S,
    )
    await runner.setup()
    return runner


def check_free(host: str, port: int) -> None:
    """UserError when `start` could not listen there now."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        raise unusable(host, port, error) from None


def unusable(host: str, port: int, error: OSError) -> UserError:
    """Why an address cannot be listened on, for a person."""
    if error.errno == errno.EADDRINUSE:
        return UserError(f"address {host}:{port} is taken; choose another port, or 0 for any")
    return UserError(
        f"address {host}:{port} cannot be used: {one_line(error)}; set serve.host and serve.port"
    )


def refusal(status: int, reason: str, detail: str) -> web.Response:
    """The one-line answer to whatever is turned away."""
    detail = "".join(letter if letter.isprintable() else " " for letter in detail)
    headers = {REASON_HEADER: reason, DETAIL_HEADER: detail}
    return web.json_response({"reason": reason, "detail": detail}, status=status, headers=headers)


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let in who has the token; turn every way to fail into one line."""
    hub = request.app[HUB]
    try:
        hub.authorize(request)
        hub.count(request)
        return await handler(request)
    except Refused as error:
        hub.backend.refused(error.reason, f"{error.detail} (from {request.remote})")
        status = {"token": 401, "run": 403}.get(error.reason, 409)
        return refusal(status, error.reason, error.detail)
    except ValueError as error:
        hub.backend.refused("frame", f"{one_line(error)} (from {request.remote})")
        return refusal(400, "frame", one_line(error))
    except Gone as error:
        return refusal(404, "gone", one_line(error))
    except web.HTTPException as error:
        return refusal(error.status, "http", f"{request.method} {request.path}: {error.reason}")
    except TimeoutError:
        return refusal(408, "stalled", f"no byte for {STALL_S:.0f} s")
    except (OSError, aiohttp.ClientError) as error:  # the client went away; nobody reads this
        return refusal(400, "disconnected", one_line(error))
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return refusal(500, "internal", "a defect of the hub; its log says more")


async def _receive(request: web.Request) -> web.StreamResponse:
    hub, name = request.app[HUB], request.match_info["name"]
    slot: Slot | None = None
    async with asyncio.timeout(STALL_S) as stall:
        loop = asyncio.get_running_loop()

        def progress(num_bytes: int) -> None:
            hub.count(request, up=num_bytes)
            stall.reschedule(loop.time() + STALL_S)
            if slot is not None:
                slot.check()

        bulk.tune(request.transport)
        content = hub.body(request)
        chunk = chunks.parse(await bulk.head(content, progress))
        if chunk.index != int(request.match_info["index"]):
            raise ValueError(f"chunk header: index {chunk.index} under address {request.path}")
        slot = hub.inbox.begin(name, chunk)
        if slot is not None:
            checksum = await bulk.soak(content, slot.view, progress)
            hub.inbox.finish(slot, checksum)
    return web.Response(status=204)


async def _serve(request: web.Request) -> web.StreamResponse:
    hub, name, index = request.app[HUB], request.match_info["name"], int(request.match_info["index"])
    try:
        source = request.app[BACKEND].source(name)
    except KeyError:
        raise Gone(f"{name} is not here") from None
    if index >= chunks.count(len(source)):
        raise ValueError(f"{name} has {chunks.count(len(source))} chunks, not {index + 1}")
    start, stop = chunks.span(index, len(source))
    body = source[start:stop]
    head = chunks.header(index, len(source), await bulk.digest(body))
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    response.content_length = len(head) + len(body)
    bulk.tune(request.transport)
    await response.prepare(request)
    try:
        async with asyncio.timeout(STALL_S) as stall:
            loop = asyncio.get_running_loop()

            def progress(num_bytes: int) -> None:
                hub.count(request, down=num_bytes)
                stall.reschedule(loop.time() + STALL_S)

            await bulk.pour(response.write, head, body, progress)
            await response.write_eof()
    except (OSError, TimeoutError):  # too late for another answer: cut the body short
        if request.transport is not None:
            request.transport.abort()
    return response


async def _arrived(request: web.Request) -> web.StreamResponse:
    name = request.match_info["name"]
    arrived = request.app[HUB].inbox.arrived(name)
    if arrived is None:
        raise Gone(f"{name}: nothing arrived")
    return web.Response(headers={ARRIVED_HEADER: ranges(arrived)})


async def _control(request: web.Request) -> web.StreamResponse:
    hub, backend = request.app[HUB], request.app[BACKEND]
    socket = web.WebSocketResponse(
        timeout=CLOSE_S, heartbeat=hub.heartbeat_s, compress=False, max_msg_size=wire.MAX_FRAME_BYTES
    )
    await socket.prepare(request)
    connection = next(hub.connections)
    link = Link(socket, wire.decode_learner, lambda num_bytes: hub.count(request, control=num_bytes))
    hub.links[connection] = link
    try:
        await backend.connected(connection, link)
        async for message in link:
            await backend.message(connection, message)
    except Exception:  # a defect behind the transport must not take the port with it
        log.exception("connection %d failed", connection)
        link.end("internal: a defect of the hub; its log says more")
    finally:
        del hub.links[connection]
        await link.close()
        if link.damage is not None:
            backend.refused("frame", f"{link.damage} (from {request.remote})")
        await backend.disconnected(connection, link.reason)
    return socket


async def _close_links(app: web.Application) -> None:
    links = list(app[HUB].links.values())
    await asyncio.gather(*(link.close("the hub closes") for link in links))
