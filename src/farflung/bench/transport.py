"""Bulk through the hub's port against a plain blocking socket, between the same two processes."""

import asyncio
import itertools
import socket
from collections.abc import Callable
from contextlib import closing

from farflung.bench.child import child
from farflung.bench.far_side import OBJECT, receive_all
from farflung.bench.measure import Measurement, Settings, interleave, speed_of
from farflung.runtime.client import HubClient
from farflung.runtime.security import new_token
from farflung.units import MIB

AIM = 0.5
Transfer = Callable[[], object]


def measure_put(settings: Settings) -> Measurement:
    """Upload: hash, send in chunks, hash again at the hub, wait for its word."""
    memory, names = memoryview(bytearray(settings.vector_bytes)), itertools.count()

    def put(runner: asyncio.Runner, client: HubClient) -> None:
        runner.run(client.put_object(f"{OBJECT}.{next(names)}", memory))

    def plain(sock: socket.socket) -> None:
        sock.sendall(b"u")
        sock.sendall(memory)
        sock.recv(1)

    return _measure(
        settings, put, plain, "upload of one object to a hub in another process, checksums included"
    )


def measure_get(settings: Settings) -> Measurement:
    """Download: hash at the hub, receive in chunks, hash again."""
    memory = memoryview(bytearray(settings.vector_bytes))

    def get(runner: asyncio.Runner, client: HubClient) -> None:
        runner.run(client.get_object(OBJECT, memory))

    def plain(sock: socket.socket) -> None:
        sock.sendall(b"d")
        receive_all(sock, memory)

    return _measure(settings, get, plain, "download of one object from there, checksums included")


def _measure(
    settings: Settings,
    transfer: Callable[[asyncio.Runner, HubClient], None],
    plain: Callable[[socket.socket], None],
    what: str,
) -> Measurement:
    token, num_bytes = new_token(), settings.vector_bytes
    with (
        child("farflung.bench.far_side", str(num_bytes), FARFLUNG_TOKEN=token) as said,
        closing(socket.create_connection(("127.0.0.1", said["port"]))) as sock,
        asyncio.Runner() as runner,
    ):
        client = HubClient(said["url"], token)
        ours, reference = (
            speed_of(lambda: transfer(runner, client), num_bytes),
            speed_of(lambda: plain(sock), num_bytes),
        )
        for warm_up in (ours, reference):
            warm_up()
        ratios, raw = interleave(ours, reference, settings.repetitions)
        runner.run(client.close())
    note = f"{num_bytes / MIB:.4g} MiB"
    return Measurement(ratios=ratios, reference=raw / 1e9, unit="GB/s", what=what, aim=AIM, note=note)
