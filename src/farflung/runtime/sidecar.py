"""The island's sidecar: a torch-free process that holds sockets, lease, tape and the Learner machine.

Started by the trainer with ``python -m farflung.runtime.sidecar``; its configuration comes as one JSON line on
standard input. A step that holds the GIL for a minute cannot starve the lease, and a crash here cannot touch
training.
"""

import asyncio
import contextlib
import mmap
import re
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from farflung.core.traffic import framed_bytes
from farflung.ipc.arena import Arena
from farflung.ipc.channel import AsyncChannel, sidecar_channel
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import mailbox as box
from farflung.protocol import objects
from farflung.protocol.learner import LearnerMachine
from farflung.recorder import Recorder
from farflung.runtime.client import ControlLink
from farflung.runtime.faulty import make_client
from farflung.runtime.memory import keep_freed_memory
from farflung.runtime.offers import Offers
from farflung.runtime.sidecar_config import SidecarConfig
from farflung.runtime.timers import Timers
from farflung.runtime.transport import Gone, Refused, TransportError

RECONNECT_S = (0.1, 0.2, 0.5, 1.0, 2.0)  # pauses between dials; the last one repeats
NO_TLS = (
    "WRONG_VERSION_NUMBER",
    "UNKNOWN_PROTOCOL",
    "HTTP_REQUEST",
    "PACKET_LENGTH_TOO_LONG",
)  # OpenSSL's words
LAST_WORDS_S = 3.0  # for the trainer to end and the last messages to leave


class Sidecar:
    """Performs what the Learner machine decides."""

    def __init__(self, config: SidecarConfig) -> None:
        self.config = config
        self.exit: asyncio.Future[act.Exit] = asyncio.get_running_loop().create_future()
        self.trainer_gone = asyncio.Event()
        self._clock = lambda: time.monotonic() - config.started_s
        self._uplink = Arena.open(config.uplink_fd, config.uplink_sizes)
        self._downlink = Arena.open(config.downlink_fd, config.downlink_sizes)
        self._client = make_client(
            self._clock, config.url, config.token, config.run, config.ssl(), learner=config.learner
        )
        self._offers: Offers | None = None
        if config.policy.topology == "gossip":
            self._offers = Offers(config, self._client, self._downlink.slot, self._vector_bytes, self.feed)
        machine = LearnerMachine(
            config.policy, learner=config.learner, run=config.run,
            address=self._offers.address if self._offers is not None else None,
        )  # fmt: skip
        path = Path(config.tape_path) if config.tape_path else None
        self._recorder = Recorder(machine, path.stem if path else config.learner, self._clock, path)
        self._timers = Timers(self._clock, lambda n, late: self.feed(ev.TimerFired(name=n, late_s=late)))
        self._link: ControlLink | None = None
        self._was_linked = False
        self._began_s = time.monotonic()
        self._uploads: dict[str, asyncio.Task[None]] = {}
        self._fetches: dict[int, asyncio.Task[None]] = {}  # the newest download of each fragment
        self._relays: dict[str, asyncio.Task[None]] = {}  # partners' vectors on their way from the hub
        self._tasks: set[asyncio.Task[None]] = set()
        sock = socket.socket(fileno=config.channel_fd)
        self._channel = AsyncChannel(
            sidecar_channel(sock), lambda report: self.feed(ev.Reported(report=report)), self._on_trainer_gone
        )

    async def run(self) -> None:
        """Serve until the machine exits; then let the last words out."""
        if self._offers is not None:
            await self._offers.start()
        self._spawn(self._connection())
        exit = await self.exit
        if exit.ok or not self.trainer_gone.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.trainer_gone.wait(), LAST_WORDS_S)
        self._timers.cancel_all()
        if self._link is not None:
            await self._link.close(exit.reason)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._channel.close()
        if self._offers is not None:
            await self._offers.close()
        await self._client.close()
        self._recorder.close()

    # ---- machine -------------------------------------------------------------------------------------

    def feed(self, event: ev.LearnerEvent) -> None:
        for action in self._recorder.handle(event):
            self._perform(action)

    def _perform(self, action: act.LearnerAction) -> None:
        match action:
            case act.Say():
                if self._link is not None:
                    self._link.send(action.message)
            case act.Post():
                self._channel.send(action.command)
                if isinstance(action.command, box.Begin) and self._offers is not None:
                    self._offers.begun(action.command.run)
            case act.SetTimer():
                self._timers.set(action.name, action.at_s)
            case act.Fetch():
                if (older := self._fetches.get(action.fragment)) is not None:
                    older.cancel()  # it must not write into the slot any more
                self._fetches[action.fragment] = self._spawn(self._fetch(action))
            case act.FetchState():
                self._spawn(self._fetch_state(action))
            case act.Upload():
                self._uploads[action.object] = self._spawn(self._upload(action))
            case act.CancelUpload():
                if (task := self._uploads.pop(action.object, None)) is not None:
                    task.cancel()
            case act.Offer():
                self._uploads[action.object] = self._spawn(self._offer(action))
            case act.Admit():
                self.offers.admit(action)
            case act.FetchRelay():
                if (task := self._relays.get(action.object)) is not None:
                    task.cancel()
                self._relays[action.object] = self._spawn(self._fetch_relay(action))
            case act.Unexpect():
                self.offers.unexpect(action.object)
                if (task := self._relays.pop(action.object, None)) is not None:
                    task.cancel()
            case act.Connect():
                self._spawn(self._connection())
            case act.Exit():
                if not self.exit.done():
                    self.exit.set_result(action)
            case act.Note():
                pass

    @property
    def offers(self) -> Offers:
        """Partners' vectors."""
        assert self._offers is not None, "a hub's learner has no partners"
        return self._offers

    def _on_trainer_gone(self, reason: str) -> None:
        self.trainer_gone.set()
        self.feed(ev.TrainerGone(reason=reason))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.exit.done():
            self.exit.set_exception(error)

    # ---- control -------------------------------------------------------------------------------------

    async def _connection(self) -> None:
        """Dial until somebody answers, then pass messages on until the link ends."""
        for attempt in range(1_000_000_000):
            try:
                self._link = await self._client.connect()
                break
            except Refused as error:
                self._give_up(str(error))
                return
            except TransportError as error:
                if self._may_give_up() and speaks_no_tls(error):
                    self._give_up(f"{self.config.url} does not speak TLS: try http://")
                    return
                if self._hopeless():
                    why = without_addresses(str(error))
                    self._give_up(f"nobody answered within {self.config.connect_within_s:g} s: {why}")
                    return
                await asyncio.sleep(RECONNECT_S[min(attempt, len(RECONNECT_S) - 1)])
        assert self._link is not None
        self._was_linked = True
        link = self._link
        self.feed(ev.LinkUp())
        async for message in link:
            self.feed(ev.Received(message=message))
        await link.close()  # before it is let go: run() closes it when this task is cancelled meanwhile
        self._link = None
        if not self.exit.done():
            self.feed(ev.LinkDown(reason=link.reason))

    def _may_give_up(self) -> bool:
        """Whether this is a syncer that nobody ever reached, and need not be waited for without end."""
        return self.config.connect_within_s is not None and not self._was_linked

    def _hopeless(self) -> bool:
        """Whether such a syncer was dialled for long enough."""
        return self._may_give_up() and time.monotonic() - self._began_s >= (self.config.connect_within_s or 0)

    def _give_up(self, reason: str) -> None:
        self._channel.send(box.End(reason=reason))
        if not self.exit.done():
            self.exit.set_result(act.Exit(reason=reason, ok=False))

    # ---- bulk ----------------------------------------------------------------------------------------

    async def _fetch(self, action: act.Fetch) -> None:
        p, version = action.fragment, action.version
        name, slot = objects.download(p, version, action.base_version), self._downlink.slot(p)
        if action.base_version is not None:  # the hub sends no increments that are larger than the whole
            slot = slot[: (version - action.base_version) * self.config.increment_sizes[p]]
        try:
            await self._client.get_object(name, slot)
        except (Gone, Refused) as error:
            self.feed(ev.FetchFailed(fragment=p, version=version, reason=str(error), gone=True))
        except TransportError as error:
            self.feed(ev.FetchFailed(fragment=p, version=version, reason=str(error)))
        else:
            self.feed(ev.Fetched(fragment=p, version=version))

    async def _fetch_state(self, action: act.FetchState) -> None:
        buffer = bytearray(action.num_bytes)
        try:
            await self._client.get_object(objects.state(action.transfer), memoryview(buffer))
        except TransportError as error:
            self.feed(ev.StateFetchFailed(transfer=action.transfer, reason=str(error)))
            return
        if xxhash.xxh3_128_hexdigest(buffer) != action.digest:
            self.feed(ev.StateFetchFailed(transfer=action.transfer, reason="wrong digest"))
            return
        await asyncio.to_thread(Path(self.config.state_path).write_bytes, buffer)
        self.feed(ev.StateFetched(transfer=action.transfer))

    async def _upload(self, action: act.Upload) -> None:
        """Send a slot; a broken transfer is resumed until it works or is no longer wanted."""
        began_s = time.monotonic()
        while True:
            try:
                with self._source(action) as view:
                    await self._client.put_object(action.object, view)
            except (Refused, Gone) as error:
                self._uploads.pop(action.object, None)
                refusal = error.reason if isinstance(error, Refused) else ""
                self.feed(ev.UploadFailed(object=action.object, reason=str(error), refusal=refusal))
                return
            except TransportError:
                await asyncio.sleep(RECONNECT_S[-1])
            else:
                break
        self._uploads.pop(action.object, None)
        self.feed(ev.Uploaded(object=action.object, transfer_s=time.monotonic() - began_s))

    async def _offer(self, action: act.Offer) -> None:
        """Send the offered vector straight to a partner."""
        event = await self.offers.send(action, self._uplink.slot(0)[: action.num_bytes])
        self._uploads.pop(action.object, None)
        self.feed(event)

    def _vector_bytes(self, name: str) -> int:
        """Size of a partner's vector, which its round says; -1 if it is not the name of one."""
        offer = objects.parse_offer(name)
        return -1 if offer is None else self.config.offer_sizes[self.config.policy.is_dense(offer[1])]

    async def _fetch_relay(self, action: act.FetchRelay) -> None:
        """Fetch what a partner left at the hub."""
        expected = self._vector_bytes(action.object)
        slot = self._downlink.slot(action.slot)[:expected]
        try:
            if action.num_bytes != expected:
                raise Refused("size", f"{action.num_bytes} bytes, {expected} expected")
            await self._client.get_object(action.object, slot)
        except Refused as error:
            event: ev.LearnerEvent = ev.RelayFailed(object=action.object, reason=error.reason)
        except TransportError as error:
            reason = "gone" if isinstance(error, Gone) else "failed"
            event = ev.RelayFailed(object=action.object, reason=reason)
        else:
            event = ev.Arrived(object=action.object, num_bytes=framed_bytes(action.num_bytes))
        self._relays.pop(action.object, None)
        self.feed(event)

    @contextlib.contextmanager
    def _source(self, action: act.Upload) -> Any:
        if action.fragment is None:
            with open(self.config.state_path, "rb") as file:
                yield memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        else:
            arena = self._downlink if action.seed else self._uplink
            yield arena.slot(action.fragment)[: action.num_bytes]


def speaks_no_tls(error: TransportError) -> bool:
    """Whether a dial failed because the other side does not speak TLS, which waiting does not change.

    >>> speaks_no_tls(TransportError("[[SSL: WRONG_VERSION_NUMBER] wrong version number]"))
    True
    """
    return any(f"[SSL: {word}]" in str(error) for word in NO_TLS)


def without_addresses(text: str) -> str:
    """An error of a dial without what only says how Python holds its TLS settings.

    >>> without_addresses("host x:1 ssl:<ssl.SSLContext object at 0x7f> [refused]")
    'host x:1 [refused]'
    >>> without_addresses("host x:1 ssl:default [refused]")
    'host x:1 [refused]'
    """
    return re.sub(r" at 0x[0-9a-fA-F]+", "", re.sub(r" ssl:(<[^>]*>|\w+)", "", text))


async def _main(config: SidecarConfig) -> None:
    await Sidecar(config).run()


def main() -> None:
    keep_freed_memory()
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=SidecarConfig)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's; its last words go through us
    asyncio.run(_main(config))


if __name__ == "__main__":
    main()
