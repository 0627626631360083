"""One control connection, the same at both ends: send never waits, receiving is iteration.

A writer task empties the outbox. A party that does not read lets it grow to MAX_OUTBOX_BYTES, then loses
its connection: nobody ever waits for a slow reader. Malformed input costs the connection, nothing else.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

import aiohttp
from aiohttp import ClientWebSocketResponse, WSMsgType
from aiohttp.web import WebSocketResponse

from farflung.protocol import wire
from farflung.protocol.messages import Message
from farflung.runtime.transport import one_line
from farflung.units import MIB

MAX_OUTBOX_BYTES = 4 * MIB  # above the largest frame; control is bytes, so this is hours of it
CLOSE_S = 2.0  # for the rest of the outbox and the closing handshake; Ctrl-C must take seconds at most
HEARTBEAT_S = 30.0  # between pings, both ways: reaps half-open connections; leases are the machines' business
MAX_REASON_BYTES = 120  # a close frame carries 123

Incoming = TypeVar("Incoming")


class Link(Generic[Incoming]):
    """Typed messages over an open WebSocket.

    Attributes:
        reason: why the link ended, one line; empty while it is up.
        damage: what was wrong with the frame that ended it, or None.
    """

    def __init__(
        self,
        websocket: WebSocketResponse | ClientWebSocketResponse,
        decode: Callable[[bytes], Incoming],
        count: Callable[[int], None],
        max_outbox_bytes: int = MAX_OUTBOX_BYTES,
    ) -> None:
        self.reason = ""
        self.damage: str | None = None
        self._socket = websocket
        self._decode = decode
        self._count = count
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._outbox_bytes = 0
        self._max_outbox_bytes = max_outbox_bytes
        self._writer = asyncio.create_task(self._write())

    def send(self, message: Message) -> None:
        """Queue one message; never waits. After the end of the link it does nothing.

        Raises:
            ValueError: the message is too large for a frame.
        """
        data = wire.encode(message)
        if self.reason:
            return
        if self._outbox_bytes + len(data) > self._max_outbox_bytes:
            self.abort(f"outbox full: {self._outbox_bytes} bytes wait for a party that does not read")
            return
        self._outbox_bytes += len(data)
        self._outbox.put_nowait(data)

    def end(self, reason: str) -> None:
        """Close once everything queued was sent; returns at once."""
        if not self.reason:
            self.reason = reason
            self._outbox.put_nowait(None)

    def abort(self, reason: str) -> None:
        """Cut the connection without sending what is queued; returns at once."""
        self.end(reason)
        sock = self._socket.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):  # already disconnected
                sock.shutdown(socket.SHUT_RDWR)

    async def close(self, reason: str = "closed") -> None:
        """Send what is queued, close, and wait for it: a few CLOSE_S at most."""
        self.end(reason)
        _, waiting = await asyncio.wait([self._writer], timeout=CLOSE_S)
        if waiting:
            self.abort(reason)
            await asyncio.wait([self._writer], timeout=CLOSE_S)
            self._writer.cancel()

    async def __aiter__(self) -> AsyncIterator[Incoming]:
        """Messages until the link ends; `reason` then says why."""
        while (frame := await self._socket.receive()).type is WSMsgType.BINARY:
            self._count(len(frame.data))
            try:
                message = self._decode(frame.data)
            except ValueError as error:
                self._spoiled(str(error))
                return
            yield message
        if frame.type is WSMsgType.TEXT:
            self._spoiled("control frame: text instead of binary")
        elif isinstance(frame.data, aiohttp.WebSocketError):
            self._spoiled(f"control frame: {one_line(frame.data)}")
        elif isinstance(frame.data, BaseException):
            self.end(one_line(frame.data))
        else:
            self.end(str(frame.extra or "") or "the other side closed")

    def _spoiled(self, detail: str) -> None:
        self.damage = detail
        self.reason = self.reason or detail
        self._outbox.put_nowait(None)

    async def _write(self) -> None:
        try:
            while (data := await self._outbox.get()) is not None:
                await self._socket.send_bytes(data)
                self._outbox_bytes -= len(data)
                self._count(len(data))
        except (OSError, RuntimeError, aiohttp.ClientError) as error:
            self.reason = self.reason or one_line(error)
        finally:
            message = self.reason.encode()[:MAX_REASON_BYTES]
            code = aiohttp.WSCloseCode.POLICY_VIOLATION if self.damage else aiohttp.WSCloseCode.OK
            with contextlib.suppress(OSError, RuntimeError, aiohttp.ClientError):
                async with asyncio.timeout(CLOSE_S):
                    await self._socket.close(code=code, message=message)
