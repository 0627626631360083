"""For soaks over real sockets in one process: a hub, learners played by hand, and what the process holds."""

import asyncio
import contextlib
import gc
import os
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from farflung.core.fragments import make_plan
from farflung.core.vectors import describe
from farflung.engine.buffers import digest
from farflung.methods import decoupled
from farflung.protocol import messages as msg
from farflung.protocol import objects
from farflung.protocol.merging import FATES_KEPT
from farflung.protocol.syncer import SyncerMachine
from farflung.runtime import chunks, server
from farflung.runtime.client import HubClient
from farflung.runtime.syncer import SyncerDriver
from farflung.testing.growth import Census, census, grown

TOKEN, RUN = "open-sesame", "run-1"
AUTH = {"Authorization": f"Bearer {TOKEN}"}
DEADLOCK_S = 60.0
PING_S = 6.0  # between pings of a link: aiohttp holds on to a closed one so long
MODEL = nn.Linear(256, 255)  # 256 KiB a payload: a few that are kept by mistake are more than all names
PLAN = make_plan(describe(MODEL), 1)
THETA_N = torch.arange(PLAN.fragments[0].num_elements, dtype=torch.float32) / 1000
PAYLOAD = memoryview(THETA_N.numpy().tobytes())
NOT_FINITE = memoryview(torch.full_like(THETA_N, float("nan")).numpy().tobytes())
STATE = memoryview(bytes(range(256)) * 64)  # of an inner optimizer

NAME_BYTES = 6 * 1024  # of the heap for each name ever seen: member, window, fates, counters; measured: 3 KiB
HEAP_BYTES = 192 * 1024  # beside that, less than one payload: caches of yarl and aiohttp were not quite full
RSS_BYTES = (
    32 * 1024 * 1024
)  # holes in the C heap, 5 MiB as measured; a fourth of what is sent in vain is more

HUB_STAYS = {  # of every name ever seen: path, and the most entries of one name there
    ".machine.membership.members": 1,  # number, data position, totals: it may come back
    ".machine.membership._in_order": 1,
    **{
        f".machine.membership.members[*].{field}": 1
        for field in ("held", "announced", "included", "non_finite", "life.included")
    },
    ".machine.membership.members[*].expected.versions": 1,
    ".machine.membership.members[*].expected.digests": 1,
    ".machine.ledger.windows": 1,  # tokens whose fate is open
    ".machine.ledger.windows[*]": 1,
    ".machine.ledger.windows[*][*].orphans": 1,
    ".machine.merging.fates": 1,  # so that a repeat changes nothing
    ".machine.merging.fates[*]": FATES_KEPT,
    ".by_learner": 1,  # bytes
    ".table._counts": 4,  # bytes by kind of object
    ".table._counts[*]": 8,
    ".heard_s": 1,
}


async def until(happened: Callable[[], object]) -> None:
    """Let the loop turn until something has happened."""
    async with asyncio.timeout(DEADLOCK_S):
        while not happened():
            await asyncio.sleep(0.001)


# ---- what is looked at -------------------------------------------------------------------------------------


@dataclass
class Moment:
    """What this process holds while everybody stands still."""

    descriptors: int
    threads: int
    tasks: int
    heap_bytes: int
    rss_bytes: int
    reached: Census

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.descriptors, self.threads, self.tasks

    @classmethod
    def now(cls, *roots: Any) -> "Moment":
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=threading.active_count(),
            tasks=len(asyncio.all_tasks()),
            heap_bytes=tracemalloc.get_traced_memory()[0],
            rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
            reached=census(*roots),
        )


async def settled(*roots: Any, like: Moment | None = None) -> Moment:
    """The moment at which what was closed is gone: when nothing ends any more, or what there is is as `like`."""
    loop = asyncio.get_running_loop()
    for _ in range(1000):  # asyncio lets go of cancelled timers, and of what they hold, once there are enough
        loop.call_later(3600.0, lambda: None).cancel()
    await asyncio.sleep(1.5 * PING_S)
    least, since_s = Moment.now(*roots), loop.time()
    while loop.time() < since_s + (1.0 if like is None else DEADLOCK_S) and (
        like is None or like.counts != least.counts
    ):
        await asyncio.sleep(0.02)
        moment = Moment.now(*roots)
        if sum(moment.counts) < sum(least.counts):
            least, since_s = moment, loop.time()
    return least


def assert_flat(early: Moment, late: Moment, names: int, stays: dict[str, int]) -> None:
    """Nothing more than before, but for what each of so many new names may leave behind."""
    assert late.counts == early.counts, (
        f"descriptors, threads, tasks: {early.counts} before, {late.counts} now"
    )
    more = {
        path: f"{before} before, {after} now"
        for path, (before, after) in grown(early.reached, late.reached, factor=1.1).items()
        if after - before > names * stays.get(path, 0)
    }
    assert not more, more
    heap_bytes, rss_bytes = late.heap_bytes - early.heap_bytes, late.rss_bytes - early.rss_bytes
    assert heap_bytes < HEAP_BYTES + NAME_BYTES * names, f"{heap_bytes} bytes for {names} names"
    print(f"\n{heap_bytes} bytes of heap for {names} names, {rss_bytes} of the process")
    assert rss_bytes < RSS_BYTES, f"the process has {rss_bytes} bytes more"


# ---- a hub, and learners played by hand ----------------------------------------------------------------------


async def half_put(
    url: str, name: str, content: memoryview, begun: Callable[[], object], learner: str = ""
) -> None:
    """A PUT whose sender dies in the middle, once its first half has `begun` to be taken in."""
    _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    head = chunks.header(0, len(content), chunks.checksum(content))
    lines = [f"PUT /objects/{name}/0 HTTP/1.1", "Host: x", f"Authorization: Bearer {TOKEN}"]
    lines += [f"X-Farflung-Learner: {learner}", f"Content-Length: {len(head) + len(content)}", "", ""]
    writer.write("\r\n".join(lines).encode() + head + content[: len(content) // 2])
    await writer.drain()
    await until(begun)
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


class Hand:
    """A learner played by hand over real sockets."""

    def __init__(self, url: str, name: str, method: str) -> None:
        self.url, self.name, self.method = url, name, method
        self.client = HubClient(url, TOKEN, RUN, learner=name, backoff_s=())
        self.incarnation = self.sequence = 0

    async def call(self, incarnation: int | None = None) -> None:
        """Connect and ask to be let in."""
        self.link = await self.client.connect()
        self.heard: dict[type, Any] = {}
        self.reader = asyncio.create_task(self.read())
        await self.join(incarnation)

    async def read(self) -> None:
        async for message in self.link:
            self.heard[type(message)] = message

    async def join(self, incarnation: int | None = None) -> None:
        self.link.send(
            msg.Join(
                protocol=msg.PROTOCOL, run=RUN, learner=self.name, fingerprint=PLAN.fingerprint(),
                layout=PLAN.to_json(), method=self.method, incarnation=incarnation, sequence=self.sequence,
            )
        )  # fmt: skip
        self.incarnation = (await self.hear(msg.Welcome)).incarnation

    async def hear(self, kind: type) -> Any:
        """The newest message of a kind that was not taken before."""
        await until(lambda: kind in self.heard or self.reader.done())
        assert kind in self.heard, f"no {kind.__name__}: {self.link.reason}"
        return self.heard.pop(kind)

    async def install(self) -> None:
        """Fetch what is to be installed, and prove to hold it."""
        asked = await self.hear(msg.Install)
        into = bytearray(len(PAYLOAD))
        await self.client.get_object(objects.fragment(0, asked.versions[0]), memoryview(into))
        held = torch.frombuffer(into, dtype=torch.float32)
        inner: dict[str, Any] = {"inner_digest": None, "lr": None}
        if asked.state is not None:
            state = bytearray(asked.state.num_bytes)
            await self.client.get_object(objects.state(asked.state.transfer), memoryview(state))
            inner = {"inner_digest": asked.state.digest, "lr": 0.1}
        self.held, self.sequence = asked.versions[0], 0
        proof = {"versions": asked.versions, "digests": [digest(held)], "cursor": asked.cursor, **inner}
        self.link.send(msg.Installed(**proof, step=asked.step))

    def boundary(self, *snapshots: tuple[int, int], **changes: Any) -> None:
        self.sequence += 1
        plain = {"sequence": self.sequence, "step": self.sequence, "tokens": 10, "step_s": 0.001}
        self.link.send(msg.Boundary(**plain, snapshots=list(snapshots), **changes))

    async def put(self, round: int, payload: memoryview = PAYLOAD) -> None:
        await self.client.put_object(objects.contribution(self.name, self.incarnation, 0, round), payload)

    def tell(self, round: int, base: int) -> None:
        contribution = {"fragment": 0, "round": round, "base_version": base, "num_bytes": len(PAYLOAD)}
        self.link.send(msg.Contribute(**contribution, steps=1, tokens=10))

    async def close(self) -> None:
        await self.link.close()
        await self.reader
        await self.client.close()


class Hub:
    """A real hub, and bob, who stays and whose contribution is merged in every round."""

    def __init__(self, tape: Path | None = None) -> None:
        self.method = decoupled(
            num_fragments=1, sync_every_steps=1, overlap_steps=0, lease_s=1000.0, grace_gamma=0.0, quorum=1,
            throttle=False,
        )  # fmt: skip
        machine = SyncerMachine(self.method.policy, run=RUN, num_learners=2, budget_tokens=10**9)
        self.driver = SyncerDriver(self.method, machine, time.monotonic, tape)
        self.failed, self.names = 0, 2

    async def __aenter__(self) -> Self:
        self.runner, port = await server.start(self.driver.application(TOKEN), "127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        self.bob = self.hand("bob")
        await self.bob.call()
        await self.bob.hear(msg.SeedRequest)
        await self.bob.client.put_object(objects.seed("bob", 1, 0), PAYLOAD)
        self.bob.link.send(msg.Seeded())
        await self.bob.install()
        self.bob.boundary()
        await self.all_threads()
        return self

    async def all_threads(self) -> None:
        """Let the driver start every thread that it may have."""
        barrier = threading.Barrier(self.driver._threads._max_workers)
        await asyncio.gather(
            *(self.driver._in_thread(barrier.wait, DEADLOCK_S) for _ in range(barrier.parties))
        )

    async def __aexit__(self, *exc: object) -> None:
        await self.bob.close()
        await self.runner.cleanup()
        self.driver.close()

    def hand(self, name: str) -> Hand:
        return Hand(self.url, name, f"decoupled:{self.method.policy.digest()}")

    async def newcomer(self) -> Hand:
        hand = self.hand(f"n{self.names}")
        self.names += 1
        await hand.call()
        return hand

    async def give(self, transfer: str) -> None:
        """bob gives its inner state to a joiner."""
        await self.bob.client.put_object(objects.state(transfer), STATE)
        ready = {"num_bytes": len(STATE), "digest": "inner", "lr": 0.1, "step": 1, "held": [self.bob.held]}
        self.bob.link.send(msg.StateReady(transfer=transfer, **ready))

    async def round_of_bob(self) -> None:
        number = (await self.bob.hear(msg.Invite)).round
        self.bob.boundary((0, number))
        await self.merge(number)

    async def merge(self, number: int) -> None:
        """bob contributes to the round, and adopts what comes of it."""
        await self.bob.put(number)
        self.bob.tell(number, self.bob.held)
        self.bob.held = (await self.bob.hear(msg.Announce)).version
        self.bob.boundary(adopted=[(0, self.bob.held)])

    @property
    def transport(self) -> server.Hub:
        assert self.driver.app is not None
        return self.driver.app[server.HUB]
