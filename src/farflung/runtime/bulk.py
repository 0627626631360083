"""Bodies through aiohttp in pieces: out of a buffer, or into one, hashing on the way.

Pieces keep the loop responsive: none of them takes a millisecond, so control passes between them.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

import xxhash
from aiohttp import StreamReader

from farflung.runtime.chunks import HEADER_BYTES
from farflung.units import MIB

PIECE_BYTES = 1 * MIB  # of one write, 0.3 ms; 256 KiB costs a fifth of the loopback speed
HASH_BYTES = 1 * MIB  # hashed at once, 0.1 ms
READ_BUFFER_BYTES = 1 * MIB  # aiohttp's; its default of 64 KiB pauses the socket after every read
UNSENT_BYTES = 1 * MIB  # that the kernel may queue unsent: bulk must not pile up before control

Progress = Callable[[int], None]  # told the bytes of each piece as it passes


def tune(transport: asyncio.BaseTransport | None) -> None:
    """Set up one connection for bulk: writes go straight from our buffer to the socket.

    With a write buffer limit of zero a drained transport is an empty one, so that the next write is sent
    from the caller's memory instead of being copied behind a rest. Unsent bytes in the kernel are bounded by
    TCP_NOTSENT_LOWAT rather than SO_SNDBUF, which would also bound the window on a long fat link.
    """
    if transport is None:
        return
    if isinstance(transport, asyncio.WriteTransport):
        transport.set_write_buffer_limits(high=0)
    sock = transport.get_extra_info("socket")
    if sock is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        with contextlib.suppress(OSError):  # not a TCP socket
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


async def digest(body: memoryview) -> int:
    """xxh3_64 of a body; lets the loop run between pieces."""
    hasher = xxhash.xxh3_64()
    for start in range(0, len(body), HASH_BYTES):
        hasher.update(body[start : start + HASH_BYTES])
        await asyncio.sleep(0)
    return hasher.intdigest()


async def pour(
    write: Callable[[memoryview], Awaitable[None]], head: bytes, body: memoryview, progress: Progress
) -> None:
    """Write a frame header and its body, a piece at a time."""
    await write(memoryview(head))
    progress(len(head))
    for start in range(0, len(body), PIECE_BYTES):
        piece = body[start : start + PIECE_BYTES]
        await write(piece)
        progress(len(piece))


async def head(content: StreamReader, progress: Progress) -> bytes:
    """Read the frame header in front of a body; ValueError when the body ends within it."""
    try:
        data = await content.readexactly(HEADER_BYTES)
    except asyncio.IncompleteReadError as error:
        raise ValueError(f"chunk header: body ended after {len(error.partial)} bytes") from None
    progress(len(data))
    return data


async def soak(content: StreamReader, into: memoryview, progress: Progress) -> int:
    """Read exactly one body into a buffer and return its xxh3_64.

    Raises:
        ValueError: the body is shorter or longer than the buffer.
    """
    hasher = xxhash.xxh3_64()
    at = 0
    while piece := await content.readany():
        stop = at + len(piece)
        if stop > len(into):
            raise ValueError(f"body is longer than the {len(into)} bytes its header names")
        progress(len(piece))  # may raise, when these bytes are no longer wanted
        into[at:stop] = piece
        hasher.update(piece)
        at = stop
    if at != len(into):
        raise ValueError(f"body ended after {at} of {len(into)} bytes")
    return hasher.intdigest()
