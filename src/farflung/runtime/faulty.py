"""Bad weather for a real sidecar: its transport, to the hub and to partners, with a plan's link faults done to it.

Only a sidecar whose environment names a file of orders has this layer; the supervisor appends to the file, one
fault a line, its moment in seconds of the run's clock. Nothing here decides: it delays, holds back, damages,
repeats and cuts, and the product's own checks have to notice.
"""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from farflung.chaos.plan import LINK_TIMEOUT_S, Fault
from farflung.protocol import messages as msg
from farflung.protocol import wire
from farflung.runtime import bulk, server
from farflung.runtime.chunks import HEADER_BYTES
from farflung.runtime.client import DIAL_PARTNER_S, PARALLEL, Body, ControlLink, HubClient
from farflung.runtime.link import CLOSE_S
from farflung.runtime.transport import TransportError, Unreachable
from farflung.units import KIB

CHAOS_VARIABLE = "FARFLUNG_CHAOS"  # the file of orders
POLL_S = 0.05  # between looks at it
PIECE_BYTES = 16 * KIB  # of a throttled transfer: 16 ms at 8 Mbit/s
REPEAT_S = 0.2  # from a contribution to its retry
GARBAGE = b"\xc1damaged"  # no message begins so: MessagePack leaves 0xc1 out


class Weather:
    """What the orders say of now.

    Args:
        path: the file of orders; it need not exist yet.
        clock: seconds since the run's start.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path, self.clock = path, clock
        self._began_s = clock()
        self._read_bytes = 0
        self._blocked_s = {"up": -inf, "down": -inf}
        self._delays: list[Fault] = []
        self._throttles: list[Fault] = []
        self._free_s = {"up": 0.0, "down": 0.0}  # when the throttled line is free again
        self._damaged = {"up": 0, "down": 0}  # chunks still to be damaged
        self.duplicates = 0  # contributions still to be sent twice
        self.cuts: list[Callable[[str], None]] = []  # what a lost link does
        self.spoil: Callable[[str], None] = lambda direction: None  # what a damaged frame does

    async def follow(self) -> None:
        """Obey orders as they are written, for ever."""
        while True:
            self.look()
            await asyncio.sleep(POLL_S)

    def look(self) -> None:
        """Obey the orders that are new."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if line.endswith(b"\n"):
                    self._read_bytes += len(line)
                    self._obey(msgspec.json.decode(line, type=Fault))

    def cut(self, why: str) -> None:
        """The link is lost."""
        for cut in list(self.cuts):
            cut(why)

    def _obey(self, fault: Fault) -> None:
        until_s = _end_s(fault)
        ways = ("up", "down") if fault.direction == "both" else (fault.direction,)
        if fault.for_s is None and (fault.at_s or 0.0) < self._began_s:
            return  # befell a sidecar that is gone; what lasts is the network's, and goes on
        match fault.kind:
            case "disconnect":
                self.cut("the link is lost (fault plan)")
            case "partition":
                for way in ways:
                    self._blocked_s[way] = max(self._blocked_s[way], until_s)
                if (fault.for_s or 0.0) > LINK_TIMEOUT_S:
                    asyncio.get_running_loop().call_later(LINK_TIMEOUT_S, self.cut, "no answer (fault plan)")
            case "delay":
                self._delays.append(fault)
            case "throttle":
                self._throttles.append(fault)
            case "duplicate":
                self.duplicates += fault.count
            case "corrupt" if fault.part == "chunk":
                for way in ways:
                    self._damaged[way] += fault.count
            case "corrupt":
                self.spoil(fault.direction)

    # ---- asked by the transport ----------------------------------------------------------------------

    @property
    def dead(self) -> bool:
        """Whether a request gets no answer: that takes both ways."""
        return self.clock() < max(self._blocked_s.values())

    def extra_s(self) -> float:
        """Latency beside the network's own, one way."""
        now = self.clock()
        return sum(f.latency_s or 0.0 for f in self._delays if now < _end_s(f))

    def due_s(self, direction: str) -> float:
        """When a message that is ready now passes."""
        return max(self.clock(), self._blocked_s[direction]) + self.extra_s()

    async def until(self, moment_s: float) -> None:
        while (left_s := moment_s - self.clock()) > 0:
            await asyncio.sleep(left_s)

    async def passage(self, within_s: float = inf) -> None:
        """Wait until a request gets through: partitions first, then its way there and back.

        Raises:
            Unreachable: a partition lasts longer than `within_s`.
        """
        until_s = self.clock() + within_s
        while self.dead:
            if self.clock() >= until_s:
                raise Unreachable("no answer (fault plan)")
            await self.until(min(until_s, max(self._blocked_s.values())))
        await asyncio.sleep(2 * self.extra_s())

    async def pace(self, direction: str, num_bytes: int) -> None:
        """Hold up bulk as a thin or cut line would."""
        now = self.clock()
        mbps = min((f.mbps or inf for f in self._throttles if now < _end_s(f)), default=inf)
        if mbps < inf:
            self._free_s[direction] = max(now, self._free_s[direction]) + num_bytes / (mbps * 125_000)
            await self.until(self._free_s[direction])
        await self.until(self._blocked_s[direction])

    def calm(self) -> bool:
        """Whether bulk passes untouched."""
        last_s = max([*map(_end_s, self._throttles), *self._blocked_s.values()])
        return not any(self._damaged.values()) and self.clock() >= last_s

    def damages(self, direction: str) -> bool:
        """Whether the chunk that passes now is damaged."""
        if not self._damaged[direction]:
            return False
        self._damaged[direction] -= 1
        return True


def _end_s(fault: Fault) -> float:
    return (fault.at_s or 0.0) + (fault.for_s or 0.0)


class FaultyBulk(HubClient):
    """Bulk in bad weather."""

    patience_s = inf  # for a partition to end

    def __init__(self, weather: Weather, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.weather = weather
        weather.cuts.append(self._cut)

    async def close(self) -> None:
        with contextlib.suppress(ValueError):  # closed before
            self.weather.cuts.remove(self._cut)
        await super().close()

    @asynccontextmanager
    async def _request(self, method: str, url: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        await self.weather.passage(self.patience_s)
        body = options.get("data")
        if isinstance(body, Body) and not self.weather.calm():
            options["data"] = FaultyBody(body, self.weather)
        async with super()._request(method, url, **options) as response:
            if "data" in options or self.weather.calm():
                yield response
            else:
                yield FaultyResponse(response, self.weather)  # type: ignore[misc]

    def _cut(self, why: str) -> None:
        """Bulk loses its connections, with whatever is on its way."""
        session, self._session = self._session, None
        if session is not None and session.connector is not None:
            self._closing = asyncio.create_task(session.close())


class FaultyPartner(FaultyBulk):
    """A client for a partner, in the weather of the learner's own link."""

    patience_s = DIAL_PARTNER_S

    async def put_object(self, name: str, view: memoryview, parallel: int = PARALLEL) -> None:
        await super().put_object(name, view, parallel)
        if self.weather.duplicates:
            self.weather.duplicates -= 1
            with contextlib.suppress(TransportError):
                await super().put_object(name, view, parallel)


class FaultyClient(FaultyBulk):
    """A hub client in bad weather. It looks at the orders from its first connection on."""

    def __init__(self, weather: Weather, *args: Any, **options: Any) -> None:
        super().__init__(weather, *args, **options)
        weather.spoil = self._spoil
        self._link: FaultyLink | None = None
        self._follower: asyncio.Task[None] | None = None

    async def connect(self) -> ControlLink:
        if self._follower is None:
            self.weather.look()
            self._follower = asyncio.create_task(self.weather.follow())
        if self.weather.dead:
            raise Unreachable("no way through (fault plan)")
        return await super().connect()

    def _link_over(self, socket: aiohttp.ClientWebSocketResponse) -> ControlLink:
        self._link = FaultyLink(self.weather, socket, wire.decode_syncer, self._count_control)
        return self._link

    async def put_object(self, name: str, view: memoryview, parallel: int = PARALLEL) -> None:
        await super().put_object(name, view, parallel)
        if self.weather.duplicates and name.startswith("contribution."):
            await super().put_object(name, view, parallel)  # the link sends the message twice

    async def close(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
        await super().close()

    def _cut(self, why: str) -> None:
        """Control and bulk lose their connections."""
        if self._link is not None:
            self._link.abort(why)
        super()._cut(why)

    def _spoil(self, direction: str) -> None:
        if self._link is not None:
            self._link.spoil(direction)


class FaultyLink(ControlLink):
    """A control link in bad weather: first in, first out all the same."""

    def __init__(self, weather: Weather, *args: Any) -> None:
        super().__init__(*args)
        self._weather, self._lost = weather, False
        self._out: deque[tuple[float, msg.Message]] = deque()
        self._pump: asyncio.Task[None] | None = None

    def send(self, message: msg.Message) -> None:
        self._put(message)
        if isinstance(message, msg.Contribute) and self._weather.duplicates:
            self._weather.duplicates -= 1
            asyncio.get_running_loop().call_later(REPEAT_S, self._put, message)

    def _put(self, message: msg.Message) -> None:
        due_s = self._weather.due_s("up")
        if not self._out and due_s <= self._weather.clock():
            super().send(message)
            return
        self._out.append((due_s, message))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._send_when_due())

    async def _send_when_due(self) -> None:
        while self._out:
            await self._weather.until(self._out[0][0])
            if self._out:
                super().send(self._out.popleft()[1])

    async def __aiter__(self) -> AsyncIterator[msg.SyncerMessage]:
        """Messages when they are due; the socket is read meanwhile, as a kernel would."""
        arrived: asyncio.Queue[tuple[float, msg.SyncerMessage] | None] = asyncio.Queue()

        async def read() -> None:
            async for message in super(FaultyLink, self).__aiter__():
                arrived.put_nowait((self._weather.due_s("down"), message))
            arrived.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while (item := await arrived.get()) is not None:
                while not self._lost and (left_s := item[0] - self._weather.clock()) > 0:
                    await asyncio.sleep(min(left_s, POLL_S))
                if self._lost:
                    return
                yield item[1]
        finally:
            reader.cancel()

    async def close(self, reason: str = "closed") -> None:
        if self._pump is not None:  # last words may be on their way
            await asyncio.wait([self._pump], timeout=CLOSE_S)
        await super().close(reason)

    def abort(self, reason: str) -> None:
        """Lose the link with what is on its way."""
        self._lost = True
        self._out.clear()
        super().abort(reason)

    def spoil(self, direction: str) -> None:
        """Damage the next frame: whoever reads it closes the connection."""
        if direction == "down":
            self._spoiled("control frame: damaged (fault plan)")
        else:
            self._outbox.put_nowait(GARBAGE)


class FaultyBody(Body):
    """The body of a PUT on a thin line, or damaged behind its header."""

    def __init__(self, body: Body, weather: Weather) -> None:
        super().__init__(body.head, body.body, body.progress)
        self._weather = weather

    async def write(self, writer: AbstractStreamWriter) -> None:
        body = damaged(self.body) if self._weather.damages("up") else self.body
        bulk.tune(getattr(writer, "transport", None))
        await bulk.pour(self._paced(writer.write), self.head, body, self.progress)

    def _paced(
        self, write: Callable[[memoryview], Awaitable[None]]
    ) -> Callable[[memoryview], Awaitable[None]]:
        async def slowly(data: memoryview) -> None:
            for start in range(0, len(data), PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                await self._weather.pace("up", len(piece))
                await write(piece)

        return slowly


class FaultyResponse:
    """The answer to a GET: as it is, but for its content."""

    def __init__(self, response: aiohttp.ClientResponse, weather: Weather) -> None:
        self._response = response
        self.content = FaultyContent(response.content, weather)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._response, name)


class FaultyContent:
    """A body on a thin line, or damaged behind its header."""

    def __init__(self, content: aiohttp.StreamReader, weather: Weather) -> None:
        self._content, self._weather = content, weather
        self._damage = False

    async def readexactly(self, num_bytes: int) -> bytes:
        self._damage = num_bytes == HEADER_BYTES and self._weather.damages("down")
        return await self._content.readexactly(num_bytes)

    async def readany(self) -> bytes:
        data = await self._content.readany()
        for start in range(0, len(data), PIECE_BYTES):
            await self._weather.pace("down", min(PIECE_BYTES, len(data) - start))
        if self._damage and data:
            self._damage = False
            return bytes(damaged(memoryview(data)))
        return data


def damaged(body: memoryview) -> memoryview:
    """A copy with one bit flipped; an empty body cannot be damaged."""
    copy = bytearray(body)
    if copy:
        copy[len(copy) // 2] ^= 0x10
    return memoryview(copy)


def order(path: Path, fault: Fault, now_s: float) -> None:
    """Tell the sidecar that reads this file to let a fault happen now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    due = msgspec.structs.replace(fault, at_progress=None, at_s=now_s)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(due) + b"\n")


def make_client(clock: Callable[[], float], *args: Any, **options: Any) -> HubClient:
    """A hub client; in bad weather where the environment names a file of orders."""
    orders = os.environ.get(CHAOS_VARIABLE)
    if orders is None:
        return HubClient(*args, **options)
    return FaultyClient(Weather(Path(orders), clock), *args, **options)


def make_partner_client(hub: HubClient, *args: Any, **options: Any) -> HubClient:
    """A client for a partner of the learner that has this client for the hub: one link carries both."""
    if not isinstance(hub, FaultyBulk):
        return HubClient(*args, **options)
    return FaultyPartner(hub.weather, *args, **options)


def befall(hub: HubClient, app: web.Application) -> None:
    """What partners send to this learner arrives on the same link, in the same weather."""
    if not isinstance(hub, FaultyBulk):
        return
    weather, arriving = hub.weather, list[web.Request]()

    @web.middleware
    async def hold_up(request: web.Request, handler: server.Handler) -> web.StreamResponse:
        arriving.append(request)
        try:
            await weather.passage()
            return await handler(request)
        finally:
            arriving.remove(request)

    def cut(why: str) -> None:
        for request in arriving:
            if request.transport is not None:
                request.transport.abort()

    app.middlewares.append(hold_up)
    app[server.HUB].body = lambda request: FaultyContent(request.content, weather)
    weather.cuts.append(cut)
