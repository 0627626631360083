"""The far side of the transport measurement: a hub and a plain blocking socket, in one process.

``python -m farflung.bench.far_side NUM_BYTES``; prints {"url", "port"}. The plain socket takes one letter: after
``u`` it receives NUM_BYTES and answers with one byte, after ``d`` it sends them.
"""

import asyncio
import json
import os
import socket
import sys
import threading

from farflung.runtime.lifeline import follow_parent
from farflung.runtime.memory import keep_freed_memory
from farflung.runtime.server import LearnerLink, make_app, start

OBJECT = "bench"


class Store:
    """A backend that keeps one object in one reused buffer (a `server.Backend`)."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = memoryview(bytearray(os.urandom(num_bytes)))
        self.app = make_app(self, os.environ["FARFLUNG_TOKEN"])

    def buffer_for(self, name: str, total_bytes: int) -> memoryview | None:
        return self.memory if name.startswith(OBJECT) and total_bytes == len(self.memory) else None

    def complete(self, name: str) -> None: ...

    def source(self, name: str) -> memoryview:
        return self.memory

    async def connected(self, connection: int, link: LearnerLink) -> None: ...

    async def message(self, connection: int, message: object) -> None: ...

    async def disconnected(self, connection: int, reason: str) -> None: ...

    def refused(self, reason: str, detail: str) -> None: ...


def receive_all(sock: socket.socket, into: memoryview) -> None:
    """Fill a buffer from a blocking socket."""
    at = 0
    while at < len(into) and (taken := sock.recv_into(into[at:])):
        at += taken


def serve_plain(listener: socket.socket, num_bytes: int) -> None:
    """Serve one client with blocking calls, the fastest that Python does."""
    memory = memoryview(bytearray(num_bytes))
    sock, _ = listener.accept()
    with sock:
        while letter := sock.recv(1):
            if letter == b"u":
                receive_all(sock, memory)
                sock.sendall(b".")
            else:
                sock.sendall(memory)


async def main() -> None:
    keep_freed_memory()
    num_bytes = int(sys.argv[1])
    follow_parent()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve_plain, args=(listener, num_bytes), daemon=True).start()
    store = Store(num_bytes)
    _, port = await start(store.app, "127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    print(json.dumps({"url": url, "port": listener.getsockname()[1]}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
