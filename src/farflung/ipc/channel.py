"""Commands to a trainer and its reports, over a socket pair on one machine.

The trainer never waits: what the socket does not take is kept and sent with the next call. Frames are a u32
little-endian length and a msgpack body. Both ends are ours, so a malformed frame is a defect, not an event.
"""

import asyncio
import contextlib
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from farflung.protocol.mailbox import AnyCommand, AnyReport
from farflung.units import KIB, MIB

MAX_FRAME_BYTES = 64 * MIB  # a length beyond this is garbage, not a message
READ_BYTES = 256 * KIB
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()

Incoming = TypeVar("Incoming")


class PeerGone(Exception):
    """The process at the other end closed its socket or died. One line."""


class Channel(Generic[Incoming]):
    """One end of the pair, for code that must not wait.

    Args:
        sock: one socket of `socket.socketpair()`; owned by the channel from now on.
        incoming: type of what arrives: AnyCommand at the trainer, AnyReport at the sidecar.
    """

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()

    @property
    def unsent(self) -> bool:
        """Whether something waits for the socket to take it."""
        return bool(self._unsent)

    def send(self, message: msgspec.Struct) -> None:
        """Send one message, or keep what the socket does not take now. Raises PeerGone."""
        body = _encoder.encode(message)
        self._unsent.append(memoryview(_LENGTH.pack(len(body)) + body))
        self.flush()

    def flush(self) -> None:
        """Send what is kept, as far as the socket takes it. Raises PeerGone."""
        try:
            while self._unsent:
                taken = self.sock.send(self._unsent[0])
                rest = self._unsent[0][taken:]
                if rest:
                    self._unsent[0] = rest
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            self._unsent.clear()
            raise PeerGone(f"the other process is gone: {error.strerror}") from None

    def poll(self) -> list[Incoming]:
        """Everything that arrived, without waiting; flushes first.

        Raises:
            PeerGone: nothing arrived and nothing ever will. What came before it is returned first.
        """
        if self._unsent:
            with contextlib.suppress(PeerGone):  # reading says so too, after what is still to be read
                self.flush()
        ended = self._fill()
        messages = self._parse()
        if ended and not messages:
            raise PeerGone("the other process closed its mailbox")
        return messages

    def wait(self, timeout_s: float) -> list[Incoming]:
        """Like `poll`, but waits until something arrives or the time is over; may return nothing."""
        deadline_s = time.monotonic() + timeout_s
        while not (messages := self.poll()):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            poller = select.poll()
            poller.register(self.sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            poller.poll(left_s * 1000)
        return messages

    def close(self) -> None:
        self.sock.close()

    def _fill(self) -> bool:
        """Read what is there; True at the end of the stream, which shows once everything before it is read."""
        try:
            while data := self.sock.recv(READ_BYTES):
                self._received += data
                if len(data) < READ_BYTES:
                    return False
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _parse(self) -> list[Incoming]:
        messages = []
        at = 0
        while len(self._received) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, at)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"mailbox frame of {length} bytes, at most {MAX_FRAME_BYTES} allowed")
            start, stop = at + _LENGTH.size, at + _LENGTH.size + length
            if stop > len(self._received):
                break
            messages.append(self._decoder.decode(self._received[start:stop]))
            at = stop
        del self._received[:at]
        return messages


class AsyncChannel(Generic[Incoming]):
    """A channel that an event loop serves: messages come as calls, in order.

    Args:
        channel: the end to serve.
        on_message: called with each message.
        on_gone: called once, with one line, when the other process is gone.
    """

    def __init__(
        self,
        channel: Channel[Incoming],
        on_message: Callable[[Incoming], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self._channel = channel
        self._on_message = on_message
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._loop.add_reader(channel.sock, self._read)

    def send(self, message: msgspec.Struct) -> None:
        """Send, now or when the socket takes it; does nothing once the other process is gone."""
        if self._open:
            with contextlib.suppress(PeerGone):  # reported by reading, after what is still to be read
                self._channel.send(message)
            self._watch_writes()

    def close(self) -> None:
        """Stop serving and close the socket."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._channel.sock)
            self._loop.remove_writer(self._channel.sock)
        self._channel.close()

    def _read(self) -> None:
        try:
            messages = self._channel.poll()
        except PeerGone as error:
            self.close()
            self._on_gone(str(error))
            return
        for message in messages:
            self._on_message(message)

    def _flush(self) -> None:
        with contextlib.suppress(PeerGone):
            self._channel.flush()
        self._watch_writes()

    def _watch_writes(self) -> None:
        if self._open and self._channel.unsent:
            self._loop.add_writer(self._channel.sock, self._flush)
        elif self._open:
            self._loop.remove_writer(self._channel.sock)


def trainer_channel(sock: socket.socket) -> Channel[AnyCommand]:
    """The trainer's end: commands come in."""
    return Channel(sock, AnyCommand)


def sidecar_channel(sock: socket.socket) -> Channel[AnyReport]:
    """The sidecar's end: reports come in."""
    return Channel(sock, AnyReport)
