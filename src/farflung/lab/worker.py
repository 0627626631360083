"""The process behind `farflung.lab.workers`."""

import contextlib
import os
import signal
import socket
import sys

import msgspec
import torch

from farflung.config import RunConfig
from farflung.ipc.channel import Channel, PeerGone
from farflung.lab.garbage import collected_seldom
from farflung.lab.task_body import task_body
from farflung.lab.workers import Request, serve


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the lab's business; we end with it
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=RunConfig)
    torch.set_num_threads(config.recipe.threads)
    task = config.task()
    channel: Channel[Request] = Channel(socket.socket(fileno=int(sys.argv[1])), Request)
    with contextlib.suppress(PeerGone), collected_seldom():
        serve(channel, lambda: task_body(config, task))
    os._exit(0)  # the lab waits for us, and a library's way of ending takes long


if __name__ == "__main__":
    main()
