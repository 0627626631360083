"""A trainer's sidecar, seen from the trainer: started, replaced when it dies, ended."""

import contextlib
import socket
import subprocess
import sys
import time

import msgspec

from farflung.ipc.arena import Arena
from farflung.ipc.channel import Channel, PeerGone, trainer_channel
from farflung.protocol import mailbox as box
from farflung.runtime.sidecar_config import SidecarConfig

SHORT_LIFE_S = 5.0  # a sidecar that dies so soon after its start ...
SHORT_LIVES = 5  # ... so many times in a row will not do better the next time
END_S = 5.0  # for its last words


class SidecarProcess:
    """One sidecar at a time.

    Args:
        config: all but its descriptors.
        uplink, downlink: shared with it; closed at the end.

    Attributes:
        channel: mailbox to the one that lives.
    """

    def __init__(self, config: SidecarConfig, uplink: Arena, downlink: Arena) -> None:
        self.config = msgspec.structs.replace(
            config, uplink_fd=uplink.fd, uplink_sizes=list(uplink.sizes),
            downlink_fd=downlink.fd, downlink_sizes=list(downlink.sizes),
        )  # fmt: skip
        self._arenas = (uplink, downlink)
        self._starts = self._short_lives = 0
        self._closed = False
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, ready: box.Ready) -> None:
        """Start it and tell it where we are."""
        ours, theirs = socket.socketpair()
        self.channel: Channel[box.AnyCommand] = trainer_channel(ours)
        tape_path = self.config.tape_path
        if tape_path is not None and self._starts:
            tape_path = tape_path.removesuffix(".jsonl") + f".{self._starts}.jsonl"
        self._starts += 1
        self._began_s = time.monotonic()
        within_s = self.config.connect_within_s if ready.incarnation is None else None
        config = msgspec.structs.replace(
            self.config, channel_fd=theirs.fileno(), tape_path=tape_path, connect_within_s=within_s
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "farflung.runtime.sidecar"],
            stdin=subprocess.PIPE,
            pass_fds=(theirs.fileno(), *(arena.fd for arena in self._arenas)),
        )
        theirs.close()
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(config) + b"\n")
        self.process.stdin.close()
        self.channel.send(ready)

    def bury(self) -> None:
        """It died: the network stack crashed, training did not.

        Raises:
            RuntimeError: it does so again and again.
        """
        assert self.process is not None
        self.channel.close()
        self.process.wait()
        lived_s = time.monotonic() - self._began_s
        self._short_lives = self._short_lives + 1 if lived_s < SHORT_LIFE_S else 0
        if self._short_lives >= SHORT_LIVES:
            raise RuntimeError(
                f"the sidecar died {self._short_lives} times within {SHORT_LIFE_S:.0f} s of its start"
            )

    def close(self, last_words: box.AnyReport | None) -> None:
        """End it, and let go of the memory. Repeats do nothing."""
        if self._closed:
            return
        self._closed = True
        if self.process is not None:
            with contextlib.suppress(PeerGone):
                if last_words is not None:
                    self.channel.send(last_words)
                    self.channel.flush()
            self.channel.close()
            try:
                self.process.wait(timeout=END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for arena in self._arenas:
            arena.close()
