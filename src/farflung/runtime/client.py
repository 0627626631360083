"""A learner's side of the wire: it dials the hub, and partners. Bulk and control use separate connections.

Failures come as one line: Refused (the hub does not want this), Gone (it no longer has it), TransferFailed
(tried as often as allowed), Unreachable (no control connection; or, without `redial`, nobody answered the dial).
"""

import asyncio
import ssl as tls
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from farflung.protocol import wire
from farflung.protocol.messages import SyncerMessage
from farflung.runtime import bulk, chunks
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
    TransferFailed,
    TransportError,
    Unreachable,
    one_line,
    unranges,
)

BACKOFF_S = (0.2, 1.0, 5.0)  # before each further attempt at one chunk
STALL_S = 60.0  # without one byte of progress, after which an attempt failed
DIAL_S = 10.0
DIAL_PARTNER_S = 2.0  # then it is reached through the hub: a round waits for it
UNFINISHED = 64  # names of uploads that broke off, at most: of older ones all is sent again
PARALLEL = 4  # one TCP stream does not fill a fat long pipe: 4 reach 99 % of 1 Gbit/s at 50 ms
REFUSALS = (401, 403, 409)
NO_ANSWER = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, Unreachable)  # to a dial

Part = tuple[int, int, int]  # index, start, stop


class ControlLink(Link[SyncerMessage]):
    """The control connection of one learner, with the session that carries nothing else."""

    session: aiohttp.ClientSession

    async def close(self, reason: str = "closed") -> None:
        await super().close(reason)
        await self.session.close()


class HubClient:
    """Dials one hub.

    Args:
        url: http(s)://host:port
        token: the run's join token.
        run_id: the run this client believes in; another run's hub refuses it.
        ssl: TLS context; None verifies https hubs against the system's authorities.
        learner: whose bytes the hub should count these as.
        backoff_s: seconds to wait before each further attempt at one chunk.
        stall_s: an attempt fails after this long without one byte of progress.
        dial_s: for a connection to be made.
        redial: whether a further attempt is worth it when no connection could be made.
    """

    def __init__(
        self,
        url: str,
        token: str,
        run_id: str | None = None,
        ssl: tls.SSLContext | None = None,
        *,
        learner: str | None = None,
        backoff_s: Sequence[float] = BACKOFF_S,
        stall_s: float = STALL_S,
        dial_s: float = DIAL_S,
        redial: bool = True,
    ) -> None:
        self.traffic = Traffic()
        self._url = url.rstrip("/")
        self._ssl: tls.SSLContext | bool = True if ssl is None else ssl
        self._headers = {"Authorization": f"Bearer {token}"}
        if run_id is not None:
            self._headers[RUN_HEADER] = run_id
        if learner is not None:
            self._headers[LEARNER_HEADER] = learner
        self._backoff_s = tuple(backoff_s)
        self._stall_s = stall_s
        self._dial_s, self._redial = dial_s, redial
        self._session: aiohttp.ClientSession | None = None
        self._unfinished: dict[str, None] = {}  # uploads that broke off: ask what arrived before going on

    async def __aenter__(self) -> "HubClient":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the bulk connections. Control links are closed on their own."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def put_object(self, name: str, view: memoryview, parallel: int = PARALLEL) -> None:
        """Upload an object; returns once the hub has checked every chunk of it.

        An upload that broke off is resumed: only chunks that did not arrive are sent.

        Raises:
            Refused, Gone, TransferFailed
        """
        parts = chunks.split(len(view))
        if name in self._unfinished:
            arrived = await self._arrived_if_known(name)
            parts = [part for part in parts if part[0] not in arrived]
        self._unfinished[name] = None
        if len(self._unfinished) > UNFINISHED:
            del self._unfinished[next(iter(self._unfinished))]
        try:
            await self._each(parts, lambda part: self._put_chunk(name, view, part), parallel)
        except (Refused, Gone):
            self._unfinished.pop(name, None)
            raise
        self._unfinished.pop(name, None)

    async def get_object(self, name: str, into: memoryview, parallel: int = PARALLEL) -> None:
        """Download an object of exactly `len(into)` bytes into a buffer, checking every chunk.

        Raises:
            Refused, Gone, TransferFailed
        """
        parts = chunks.split(len(into))
        await self._each(parts, lambda part: self._get_chunk(name, into, part), parallel)

    async def call(self, method: str, path: str, body: object = None) -> Any:
        """One of the hub's JSON routes: its decoded answer.

        Raises:
            Refused, Gone, TransferFailed
        """
        try:
            async with asyncio.timeout(self._stall_s):
                async with self._request(method, f"{self._url}{path}", json=body) as response:
                    return await response.json()
        except (OSError, aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise TransferFailed(f"{method} {path}: {one_line(error)}") from None

    async def connect(self) -> ControlLink:
        """Open the control connection.

        Raises:
            Refused: wrong token or run.
            Unreachable: anything else.
        """
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=DIAL_S))
        try:
            async with asyncio.timeout(2 * DIAL_S):
                socket = await session.ws_connect(
                    f"{self._url}/ws",
                    headers=self._headers,
                    ssl=self._ssl,
                    heartbeat=HEARTBEAT_S,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
                    max_msg_size=wire.MAX_FRAME_BYTES,
                )
        except aiohttp.WSServerHandshakeError as error:
            await session.close()
            if error.status in REFUSALS:
                raise _refused(error.status, error.headers or {}) from None
            raise Unreachable(f"{self._url}: answered {error.status} {one_line(error)}") from None
        except (OSError, aiohttp.ClientError, TimeoutError, ValueError) as error:
            await session.close()
            raise Unreachable(f"{self._url}: {one_line(error)}") from None
        except BaseException:
            await session.close()
            raise
        link = self._link_over(socket)
        link.session = session
        return link

    def _link_over(self, socket: aiohttp.ClientWebSocketResponse) -> ControlLink:
        return ControlLink(socket, wire.decode_syncer, self._count_control)

    # ---- parts of a transfer -----------------------------------------------------------------------------

    async def _each(
        self, parts: Iterable[Part], transfer: Callable[[Part], Awaitable[None]], parallel: int
    ) -> None:
        """Transfer all parts, `parallel` at once; the first failure cancels the rest."""
        waiting = iter(parts)

        async def worker() -> None:
            for part in waiting:
                await transfer(part)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(parallel):
                    group.create_task(worker())
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None

    async def _put_chunk(self, name: str, view: memoryview, part: Part) -> None:
        index, start, stop = part
        body = view[start:stop]
        again = False

        async def attempt() -> None:
            nonlocal again
            if again and index in await self._arrived_if_known(name):
                return  # only its answer was lost
            again = True
            head = chunks.header(index, len(view), await bulk.digest(body))
            async with (
                self._watched(lambda num_bytes: self._count(up=num_bytes)) as progress,
                self._request("PUT", self._address(name, index), data=Body(head, body, progress)),
            ):
                pass

        await self._retry(f"put {name} chunk {index}", attempt)

    async def _get_chunk(self, name: str, into: memoryview, part: Part) -> None:
        index, start, stop = part

        async def attempt() -> None:
            async with (
                self._watched(lambda num_bytes: self._count(down=num_bytes)) as progress,
                self._request("GET", self._address(name, index)) as response,
            ):
                chunk = chunks.parse(await bulk.head(response.content, progress))
                if chunk.index != index or chunk.total_bytes != len(into):
                    raise ValueError(f"chunk {chunk.index} of {chunk.total_bytes} bytes, not of {len(into)}")
                chunk.verify(await bulk.soak(response.content, into[start:stop], progress))

        await self._retry(f"get {name} chunk {index}", attempt)

    async def _arrived_if_known(self, name: str) -> set[int]:
        try:
            async with asyncio.timeout(self._stall_s):
                async with self._request("HEAD", self._address(name)) as response:
                    return unranges(response.headers.get(ARRIVED_HEADER, ""))
        except Gone:
            return set()
        except (OSError, aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise TransferFailed(f"ask for {name}: {one_line(error)}") from None

    async def _retry(self, what: str, attempt: Callable[[], Awaitable[None]]) -> None:
        """Try until it works, with a pause before each further attempt; refusals are final."""
        for pause_s in (*self._backoff_s, None):
            try:
                await attempt()
                return
            except (Refused, Gone):
                raise
            except (TransportError, OSError, aiohttp.ClientError, TimeoutError, ValueError) as error:
                if not self._redial and isinstance(error, NO_ANSWER):
                    raise Unreachable(f"{what}: {one_line(error)}") from None
                if pause_s is None:
                    raise TransferFailed(f"{what}: {one_line(error)}") from None
            await asyncio.sleep(pause_s)

    @asynccontextmanager
    async def _watched(self, count: Callable[[int], None]) -> AsyncIterator[bulk.Progress]:
        """A transfer that fails when it makes no progress."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._stall_s) as stall:

                def progress(num_bytes: int) -> None:
                    count(num_bytes)
                    if not stall.expired():
                        stall.reschedule(loop.time() + self._stall_s)

                yield progress
        except TimeoutError:
            raise TransferFailed(f"no progress for {self._stall_s:g} s") from None

    @asynccontextmanager
    async def _request(self, method: str, url: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """An authenticated request whose refusal is an exception."""
        async with self._bulk_session().request(
            method, URL(url, encoded=True), ssl=self._ssl, allow_redirects=False, **options
        ) as response:
            if response.status in REFUSALS:
                raise _refused(response.status, response.headers)
            detail = response.headers.get(DETAIL_HEADER, f"status {response.status}")
            if response.status == 404:
                raise Gone(detail)
            if response.status >= 300:
                raise TransferFailed(detail)
            yield response

    def _bulk_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                auto_decompress=False,
                connector=aiohttp.TCPConnector(limit=0),
                read_bufsize=bulk.READ_BUFFER_BYTES,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._dial_s),
            )
        return self._session

    def _address(self, name: str, index: int | None = None) -> str:
        address = f"{self._url}/objects/{quote(name, safe='')}"
        return address if index is None else f"{address}/{index}"

    def _count(self, up: int = 0, down: int = 0) -> None:
        self.traffic.bytes_up += up
        self.traffic.bytes_down += down

    def _count_control(self, num_bytes: int) -> None:
        self.traffic.bytes_control += num_bytes


class Body(aiohttp.payload.Payload):
    """Frame header and body of one PUT, written from the caller's memory."""

    def __init__(self, head: bytes, body: memoryview, progress: bulk.Progress) -> None:
        super().__init__(body)
        self.head, self.body, self.progress = head, body, progress
        self._size = len(head) + len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("bulk bodies are not text")

    async def write(self, writer: AbstractStreamWriter) -> None:
        bulk.tune(getattr(writer, "transport", None))
        await bulk.pour(writer.write, self.head, self.body, self.progress)


def _refused(status: int, headers: Any) -> Refused:
    return Refused(headers.get(REASON_HEADER, str(status)), headers.get(DETAIL_HEADER, f"status {status}"))
