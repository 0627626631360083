"""Nothing grows (P8): real sockets, drivers and sidecars in one process.

Hundreds of transfers and links break in the middle, and learners come and go. Two moments are compared at which
everybody stands still, after a fourth of it and at the end: descriptors, threads and tasks exactly; what can be
reached from the product's objects, by path; the heap and the process; and the tape by line.
"""

import asyncio
import os
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest
import torch
from aiohttp import web, web_app
from party_helpers import Party
from soak_helpers import (
    AUTH,
    HUB_STAYS,
    NOT_FINITE,
    PAYLOAD,
    PING_S,
    PLAN,
    STATE,
    TOKEN,
    Hand,
    Hub,
    Moment,
    assert_flat,
    half_put,
    settled,
    until,
)  # fmt: skip
from torch import nn

from farflung.engine import trainer as trainer_module
from farflung.engine.make import make_island
from farflung.engine.trainer import Trainer
from farflung.ipc.arena import Arena
from farflung.ipc.channel import trainer_channel
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import mailbox as box
from farflung.protocol import messages as msg
from farflung.protocol import objects
from farflung.runtime import chunks, inbox, offers, server
from farflung.runtime import client as client_module
from farflung.runtime import sidecar as sidecar_module
from farflung.runtime import syncer as syncer_module
from farflung.runtime.client import HubClient
from farflung.runtime.face import _arenas
from farflung.runtime.sidecar import Sidecar
from farflung.runtime.sidecar_config import SidecarConfig
from farflung.runtime.transport import Refused
from farflung.train.inner import ModelInner

PERIOD = 56  # changes, after which all ways to fail and to come and go come in the same order again
CHANGES = 4 * PERIOD
LEARNER_CHANGES = 96
MAX_WAYS = 8  # of a gossip learner to its partners


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is bounded is full, and what waits is over, before the first look."""
    monkeypatch.setattr(syncer_module, "NOTES_KEPT", 64)
    monkeypatch.setattr(inbox, "REMEMBERED", 16)
    monkeypatch.setattr(client_module, "UNFINISHED", 16)
    monkeypatch.setattr(trainer_module, "RECENT", 16)
    monkeypatch.setattr(offers, "MAX_WAYS", MAX_WAYS)
    monkeypatch.setattr(client_module, "HEARTBEAT_S", PING_S)
    monkeypatch.setattr(syncer_module, "make_app", partial(server.make_app, heartbeat_s=PING_S))
    monkeypatch.setattr(sidecar_module, "RECONNECT_S", (0.02,))
    monkeypatch.setattr(
        sidecar_module,
        "make_client",
        lambda clock, *args, **options: HubClient(*args, **options, backoff_s=(0.02,)),
    )


# ---- a hub -------------------------------------------------------------------------------------------------


class Soak(Hub):
    """Beside bob there is ada, whose contributions all come to nothing, and many others come and go."""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        await self.round_of_bob()  # it may give its state
        self.ada = self.hand("ada")
        await self.ada.call()
        await self.give((await self.bob.hear(msg.Donate)).transfer)
        await self.ada.install()
        self.ada.boundary()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.ada.close()
        await super().__aexit__(*exc)

    async def still(self, like: Moment | None) -> Moment:
        """Nobody sends, and no connection is kept for what may come."""
        for hand in (self.ada, self.bob):
            await hand.client.close()
        return await settled(self.driver, self.transport, like=like)

    # ---- what fails ----------------------------------------------------------------------------------

    async def half(self, hand: Hand, name: str, content: memoryview = PAYLOAD) -> None:
        """A PUT that is cut in the middle of its body."""
        await half_put(self.url, name, content, lambda: name in self.driver._arriving, hand.name)

    async def fail(self, way: int, round: int) -> None:
        """What ada has to say to a round comes to nothing."""
        ada, name = self.ada, objects.contribution("ada", self.ada.incarnation, 0, round)
        self.failed += 1
        match way:
            case 0:  # cut, and no longer wanted when the next round opens
                await self.half(ada, name)
            case 1:  # whole, but its message is lost
                await ada.put(round)
            case 2:
                await ada.put(round, NOT_FINITE)
                ada.tell(round, ada.held)
                assert (await ada.hear(msg.FateOf)).reason == "non_finite"
                if self.driver.machine.membership.members["ada"].state == "gone":  # the third time: reset
                    await ada.hear(msg.Stop)
                    await ada.join()
                    await self.give((await self.bob.hear(msg.Donate)).transfer)
                    await ada.install()
                    ada.boundary()
            case 3:
                with pytest.raises(Refused):
                    await ada.put(round, PAYLOAD[:-4])
            case 4:  # the task is cancelled while it sends
                upload = asyncio.create_task(ada.put(round))
                await asyncio.sleep(0)
                upload.cancel()
                await asyncio.gather(upload, return_exceptions=True)
            case 5:  # damaged
                head = chunks.header(0, len(PAYLOAD), 1)
                async with aiohttp.request(
                    "PUT", f"{self.url}/objects/{name}/0", data=head + bytes(PAYLOAD),
                    headers=AUTH,
                ) as response:  # fmt: skip
                    assert response.status == 400
            case 6:  # its link is cut, and made again
                ada.link.abort("cut")
                await ada.link.close()
                await ada.reader
                await until(lambda: len(self.driver._links) == 1)
                await ada.call(ada.incarnation)
                await ada.hear(msg.Reattached)

    async def round(self, way: int) -> None:
        """bob's contribution is merged, ada's is not."""
        number = (await self.bob.hear(msg.Invite)).round
        self.bob.boundary((0, number))
        self.ada.boundary((0, number))
        await self.fail(way, number)
        await self.merge(number)
        self.ada.held = (await self.ada.hear(msg.Announce)).version
        self.ada.boundary(adopted=[(0, self.ada.held)])

    # ---- who takes part ------------------------------------------------------------------------------

    async def change(self, change: int) -> None:
        """Somebody comes and goes, or ada comes back; half of it leaves a name behind."""
        match change % 8:
            case 0:  # has one contribution merged, begins another one, and crashes
                newcomer = await self.trained()
                await self.half(newcomer, objects.contribution(newcomer.name, 1, 0, 10**6))
                newcomer.link.send(msg.TrainerLost(reason="crashed"))
            case 1:  # leaves
                newcomer = await self.trained()
                newcomer.link.send(msg.Leave(reason="enough"))
            case 2:  # is killed while it trains, without a word
                newcomer = await self.trained()
                newcomer.link.abort("killed")
            case 3 | 4:  # is killed while it installs; its donor had given it its state, or was still sending
                newcomer = await self.newcomer()
                transfer = (await self.bob.hear(msg.Donate)).transfer
                if change % 8 == 3:
                    await self.give(transfer)
                    await newcomer.hear(msg.Install)
                    await self.half_of(f"fragment.0.{self.bob.held}")
                else:
                    await self.half(self.bob, objects.state(transfer), STATE)
                newcomer.link.abort("killed")
            case 5:  # a new process has ada's name, and fences the old one
                old, self.ada = self.ada, self.hand("ada")
                await self.ada.call()
                await self.give((await self.bob.hear(msg.Donate)).transfer)
                await self.ada.install()
                self.ada.boundary()
                newcomer = old
            case 6:  # is refused
                newcomer = self.hand("stranger")
                with pytest.raises(AssertionError, match="no Welcome"):
                    await newcomer.call(incarnation=7)
            case _:  # its frame is garbage
                newcomer = await self.newcomer()
                transfer = (await self.bob.hear(msg.Donate)).transfer
                newcomer.link._outbox.put_nowait(b"\xc1damaged")
                await newcomer.reader
                await until(lambda: transfer not in self.driver.machine.admission.transfers)
        await newcomer.close()
        await until(lambda: len(self.driver._links) == 2)

    async def trained(self) -> Hand:
        newcomer = await self.newcomer()
        await self.give((await self.bob.hear(msg.Donate)).transfer)
        await newcomer.install()
        newcomer.boundary()
        return newcomer

    async def half_of(self, name: str) -> None:
        """A GET that is cut once something has come."""
        async with (
            aiohttp.ClientSession(headers=AUTH) as session,
            session.get(f"{self.url}/objects/{name}/0") as response,
        ):
            await response.content.readany()
            response.close()


@pytest.mark.slow
async def test_a_hub_holds_no_more_than_before(tmp_path: Path, traced: None, short: None) -> None:
    tape = tmp_path / "syncer.jsonl"
    async with Soak(tape) as soak:
        moments, names, written = list[Moment](), list[int](), [size(tape)]
        for change in range(CHANGES):
            for way in range(3):
                await soak.round((change + way) % 7)
            await soak.change(change)
            if change + 1 in (PERIOD, CHANGES):
                moments.append(await soak.still(moments[0] if moments else None))
                names.append(soak.names)
            if (change + 1) % PERIOD == 0:
                written.append(size(tape))
    assert soak.failed >= 600
    assert_flat(*moments, names[1] - names[0], HUB_STAYS)
    line_bytes = [(b - a) / (m - n) for (a, n), (b, m) in pairwise(written)]
    assert max(line_bytes) < 1.15 * line_bytes[0], line_bytes  # numbers get longer


def size(tape: Path) -> tuple[int, int]:
    """Bytes and lines."""
    data = tape.read_bytes()
    return len(data), data.count(b"\n")


async def test_of_a_learners_fragment_only_the_newest_upload_and_the_last_whole_one_are_kept(
    short: None,
) -> None:
    async with Soak() as soak:
        names = [objects.contribution("ada", 1, 0, number) for number in range(100, 106)]
        for name in names[:2]:
            await soak.half(soak.ada, name)
        for name in names[2:4]:
            await soak.ada.client.put_object(name, PAYLOAD)
        await soak.half(soak.ada, names[5])
        with pytest.raises(Refused, match="not expected"):  # a newer one is coming
            await soak.ada.client.put_object(names[4], PAYLOAD)
        assert list(soak.driver._objects) == [names[3]] and list(soak.driver._arriving) == [names[5]]
        assert list(soak.transport.inbox._uploads) == [names[5]]


async def test_what_is_decoded_while_a_new_process_takes_its_learners_name_is_let_go_of(short: None) -> None:
    async with Soak() as soak:
        assert soak.driver.hub is not None
        receive, go_on = soak.driver.hub.receive, threading.Event()

        def slowly(*args: Any) -> Any:
            go_on.wait()
            return receive(*args)

        soak.driver.hub.receive = slowly  # type: ignore[method-assign]
        await soak.ada.put(1)
        soak.ada.tell(1, 0)
        anew = soak.hand("ada")
        await anew.call()
        go_on.set()
        await until(lambda: soak.driver.machine.refused.get("not_joined"))
        assert not soak.driver.hub._owner and not soak.driver.hub._fragments[0]._waiting
        await anew.close()


# ---- a learner's sidecar, and its trainer ----------------------------------------------------------------------


class Learner:
    """A learner of this process: a real trainer and a real sidecar, which shares the loop with the hub.

    Its parameters drift a little at every boundary; that is all its training.
    """

    def __init__(self, hub: Hub, folder: Path) -> None:
        method, self.model = hub.method, nn.Linear(256, 255)
        up, down = _arenas(PLAN, method)
        self.arenas = [up, down, *(Arena.open(os.dup(a.fd), a.sizes) for a in (up, down))]
        slots = [torch.frombuffer(arena.slot(0), dtype=torch.uint8) for arena in (up, down)]
        inner = ModelInner(self.model, torch.optim.SGD(self.model.parameters(), lr=0.1), None, {})
        island, its_inner = make_island(
            self.model, PLAN, method, lambda p: slots[0], lambda p: slots[1], inner
        )
        state = folder / "state"
        self.trainer = Trainer(
            island,
            its_inner,
            put_state=state.write_bytes,
            get_state=state.read_bytes,
            save=lambda: None,  # type: ignore[arg-type]
        )
        ours, theirs = socket.socketpair()
        self.channel = trainer_channel(ours)
        self.sidecar = Sidecar(
            SidecarConfig(
                url=hub.url, token=TOKEN, learner="ada", policy=method.policy, channel_fd=theirs.detach(),
                uplink_fd=self.arenas[2].fd, uplink_sizes=list(up.sizes), downlink_fd=self.arenas[3].fd,
                downlink_sizes=list(down.sizes), state_path=str(state), tape_path=str(folder / "ada.jsonl"),
            )
        )  # fmt: skip
        self.channel.send(
            box.Ready(
                learner="ada", fingerprint=PLAN.fingerprint(), layout=PLAN.to_json(),
                method=f"decoupled:{method.policy.digest()}",
            )
        )  # fmt: skip
        self.serving = asyncio.create_task(self.sidecar.run())
        self.training = asyncio.create_task(self.train())
        self.standing = self.broken = False

    async def train(self) -> None:
        """Boundaries, a millisecond apart."""
        while self.trainer.ended is None:
            await asyncio.sleep(0.001)
            if self.standing:
                continue
            for command in self.channel.poll():
                self.trainer.take(command)
            if self.trainer.may_step()[0]:
                with torch.no_grad():
                    self.model.bias.add_(float("nan") if self.broken else 1e-3)
                self.trainer.stepped(10, step_s=0.001)
            else:
                self.trainer.idle()
            reports, self.trainer.reports = self.trainer.reports, []
            for report in reports:
                self.channel.send(report)

    async def close(self) -> None:
        self.standing = False
        self.channel.send(box.Ended(reason="enough"))
        self.trainer.ended = "enough"
        await self.training
        self.channel.close()
        await self.serving
        for arena in self.arenas:
            arena.close()


class Spoiled:
    """The body of an upload that stands still, breaks off or is damaged once its header has come."""

    def __init__(self, request: web.Request, trouble: str) -> None:
        self.request, self.content, self.trouble = request, request.content, trouble

    async def readexactly(self, num_bytes: int) -> bytes:
        return await self.content.readexactly(num_bytes)

    async def readany(self) -> bytes:
        data = await self.content.readany()
        if self.trouble == "cut" and self.request.transport is not None:
            self.request.transport.abort()
        if self.trouble in ("cut", "stall"):
            while self.content.exception() is None:  # its sender is there
                await asyncio.sleep(0.005)
            raise ConnectionResetError("cut")
        return bytes(reversed(data))


class Company(Hub):
    """A hub with bob, ada as a real learner whose uploads are in trouble, and others that want her state."""

    async def begin(self, folder: Path) -> None:
        self.trouble, self.spoiled = "", set[str]()
        self.transport.body = self.body
        await self.round_of_bob()
        self.ada = Learner(self, folder)
        await self.refuse_to_give()
        await until(lambda: self.member.state == "training")

    @property
    def member(self) -> Any:
        return self.driver.machine.membership.members["ada"]

    def body(self, request: web.Request) -> Any:
        name = request.match_info["name"]
        if not self.trouble or not name.startswith("contribution.ada."):
            return request.content
        self.spoiled.add(name)
        return Spoiled(request, self.trouble)

    async def refuse_to_give(self) -> None:
        """bob's state is no optimizer's: ada begins without one."""
        transfer = (await self.bob.hear(msg.Donate)).transfer
        self.bob.link.send(msg.StateFailed(transfer=transfer, reason="busy"))

    async def round(self, trouble: str = "") -> None:
        """ada's contribution is in trouble, or has its fate; bob's is merged, if the round is still open."""
        self.trouble = trouble
        number = (await self.bob.hear(msg.Invite)).round
        self.bob.boundary((0, number))
        life = self.member.incarnation
        name = objects.contribution("ada", life, 0, number)
        fates = self.driver.machine.merging.fates
        await until(
            lambda: (
                name in self.spoiled
                or number in fates.get(("ada", life, 0), {})
                or (self.member.state, self.member.incarnation) != ("training", life)
            )
        )
        await self.merge(number)

    async def still(self, like: Moment | None) -> Moment:
        """Everybody stands; what was sent has arrived, and no connection is kept for what may come."""
        await self.round()
        self.ada.standing = True
        await until(lambda: not self.ada.sidecar._uploads)
        for client in (self.bob.client, self.ada.sidecar._client):
            await client.close()
        moment = await settled(self.driver, self.transport, self.ada.sidecar, self.ada.trainer, like=like)
        self.ada.standing = False
        return moment

    async def change(self, change: int) -> None:
        """Her link breaks; her numbers do, and she starts over; somebody wants her state and takes it or dies."""
        if change % 4 == 0:
            self.ada.sidecar._link.abort("cut")  # type: ignore[union-attr]
            await until(lambda: self.member.connection is None)
            await until(lambda: self.member.connection is not None)
            return
        await self.round()
        if change % 4 == 1:
            self.ada.broken = True
            while self.member.state == "training":
                await self.round()
            self.ada.broken = False
            await self.refuse_to_give()
            await until(lambda: self.member.state == "training")
            return
        newcomer = await self.newcomer()
        await until(lambda: msg.Donate in self.bob.heard or msg.Install in newcomer.heard)
        if msg.Donate in self.bob.heard:  # ada is too far behind, just now
            await self.give((await self.bob.hear(msg.Donate)).transfer)
        if change % 4 == 2:
            await newcomer.install()
            await until(lambda: not self.driver.machine.admission.transfers)
            newcomer.link.send(msg.Leave(reason="enough"))
        else:
            newcomer.link.abort("killed")
        await newcomer.close()
        await until(lambda: len(self.driver._links) == 2)


@pytest.mark.slow
async def test_a_learner_holds_no_more_than_before(tmp_path: Path, traced: None, short: None) -> None:
    async with Company() as company:
        await company.begin(tmp_path)
        moments, names, lives = list[Moment](), list[int](), list[int]()
        for change in range(LEARNER_CHANGES):
            for trouble in ("cut", "stall", "damage"):
                await company.round(trouble)
            await company.change(change)
            if change + 1 in (LEARNER_CHANGES // 4, LEARNER_CHANGES):
                moments.append(await company.still(moments[0] if moments else None))
                names.append(company.names)
                lives.append(company.member.incarnation)
        await company.ada.close()
    assert len(company.spoiled) >= 200
    assert names[1] - names[0] >= 30 and lives[1] - lives[0] >= 15
    assert_flat(*moments, names[1] - names[0], HUB_STAYS)


# ---- a gossip learner and its partners -------------------------------------------------------------------------

SIZE_BYTES = 64 * 1024  # of a vector
VECTOR = memoryview(bytes(range(256)) * (SIZE_BYTES // 256))


class Meetings:
    """a stays; it meets one partner after another, each somewhere else, some under a name it had before."""

    def __init__(self, a: Party) -> None:
        self.a, self.epoch, self.round, self.failed, self.names = a, 0, -1, 0, set[str]()

    async def change(self, change: int) -> None:
        """A partner comes, is met or missed in some rounds, and goes."""
        name = f"b{change // 2}" if change % 4 < 2 else f"c{change % 3}"
        self.names.add(name)
        self.epoch += 1
        async with Party(name, size=SIZE_BYTES) as b:
            for party, other in ((self.a, b), (b, self.a)):
                if party is b or self.epoch == 1:
                    party.train(other, epoch=self.epoch, round=self.round + 1)
                else:
                    party.assemble(other, epoch=self.epoch, round=self.round + 1)
            self.end(self.a)  # the round with the partner before
            for way in range(3):
                await self.meet(b, (change + way) % 6)
        b.memory.clear()  # 8 MiB, which would wait for the garbage collector
        self.a.events.clear()
        self.a.actions.clear()

    async def meet(self, b: Party, way: int) -> None:
        """A round; in five ways of six nothing comes of it."""
        a = self.a
        meeting = a.machine.peer.meeting
        assert meeting is not None and list(meeting.partners) == [b.name], meeting
        if b.machine.peer.meeting is None or b.machine.peer.meeting.round < meeting.round:
            self.end(b)
        self.round = meeting.round
        address = b.address if way != 1 else "http://127.0.0.1:9"
        offered = act.Offer(
            object=self.name(b, ours=True), partner=b.name, address=address, num_bytes=SIZE_BYTES
        )
        self.stand(a)
        self.stand(b)
        b.offers.app[server.HUB].body = lambda request: (
            Spoiled(request, "stall") if way == 2 else request.content
        )
        sending = asyncio.create_task(a.offers.send(offered, VECTOR))
        if way == 2:  # cancelled in the middle
            await until(lambda: b.heard(ev.Knocked))
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        else:
            a.feed(await sending)
        theirs = self.name(b, ours=False)
        if way == 0:
            b.feed(
                await b.offers.send(
                    act.Offer(object=theirs, partner="a", address=a.address, num_bytes=SIZE_BYTES), VECTOR
                )
            )
        elif way in (3, 4):  # half of it comes; or it does not belong here
            knocks = len(a.heard(ev.Knocked))
            name = theirs if way == 3 else objects.offer(9, 9, b.name, "a")
            await half_put(a.address, name, VECTOR, lambda: len(a.heard(ev.Knocked)) > knocks)
        self.failed += way > 0
        for party in (a, b):
            self.end(party)

    def name(self, b: Party, ours: bool) -> str:
        pair = ("a", b.name) if ours else (b.name, "a")
        return objects.offer(self.epoch, self.round, *pair)

    def stand(self, party: Party) -> None:
        """Its trainer has done the steps of the round, and offers its vector."""
        meeting = party.machine.peer.meeting
        assert meeting is not None
        party.sequence = meeting.ends_at
        party.offer(meeting.round, meeting.ends_at)

    def end(self, party: Party) -> None:
        """The deadline passes for who is still waited for, and the round is mixed."""
        meeting = party.machine.peer.meeting
        if meeting is None:
            return
        if not meeting.mixing:
            if meeting.waits_since_s is None:
                self.stand(party)
            party.feed(ev.TimerFired(name="meet"))
        met = [1.0 for partner in meeting.partners.values() if partner.met]
        mixed = box.Mixed(round=meeting.round, steps=2, tokens=16, distances=list(met), correction=0.0)
        party.boundary(meeting.ends_at, mixed=mixed)
        party.hear(msg.Progress(tokens=0, sequence=party.machine.sequence))


GOSSIP_STAYS = {"by_learner": 1, "heard_s": 1, "table._counts": 1, "table._counts[*]": 2}  # bytes, by partner


@pytest.mark.slow
async def test_a_gossip_learner_holds_no_more_than_before(
    traced: None, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # aiohttp remembers the last thousand applications of a process; here each partner is one more
    monkeypatch.setattr(web_app, "_cached_build_middleware", web_app._build_middlewares)
    async with Party("a", size=SIZE_BYTES) as a:
        meetings, moments, names = Meetings(a), list[Moment](), list[int]()
        for change in range(CHANGES):
            await meetings.change(change)
            if change + 1 in (PERIOD, CHANGES):
                roots = (a.offers, a.machine, a.offers.app[server.HUB])
                moments.append(await settled(*roots, like=moments[0] if moments else None))
                names.append(len(meetings.names))
    assert meetings.failed >= 500
    assert names[0] > MAX_WAYS and names[1] - names[0] > 30
    assert_flat(*moments, names[1] - names[0], {f".{path}": most for path, most in GOSSIP_STAYS.items()})
