"""The fault-injecting transport over real sockets: what is damaged is caught, what is lost comes again."""

import asyncio
import os
import time

import pytest

from farflung.chaos.plan import Fault
from farflung.protocol import messages as msg
from farflung.runtime import faulty, server
from farflung.runtime.client import HubClient
from farflung.runtime.transport import Unreachable
from farflung.units import CHUNK_BYTES

TOKEN = "open-sesame"
BIG = os.urandom(1024) * (CHUNK_BYTES // 1024) + b"tail"  # two chunks
NAME = "contribution.learner-0.1.0.1"
MESSAGE = msg.Contribute(fragment=0, round=1, base_version=0, steps=4, tokens=40, num_bytes=len(BIG))


class Backend:
    """Keeps what arrives and counts what is turned away."""

    def __init__(self):
        self.objects = {"fragment.0.1": bytearray(BIG)}
        self.refusals, self.messages, self.links, self.gone = [], [], [], asyncio.Event()

    def buffer_for(self, name, total_bytes):
        return memoryview(self.objects.setdefault(name, bytearray(total_bytes)))

    def complete(self, name):
        pass

    def source(self, name):
        return memoryview(self.objects[name])

    async def connected(self, connection, link):
        self.links.append(link)

    async def message(self, connection, message):
        self.messages.append((time.monotonic(), message))

    async def disconnected(self, connection, reason):
        self.gone.set()

    def refused(self, reason, detail):
        self.refusals.append(detail)


@pytest.fixture
async def backend():
    return Backend()


@pytest.fixture
async def client(backend, tmp_path, monkeypatch):
    """A client with an order file; `client.order(kind, ...)` lets a fault happen now."""
    app = server.make_app(backend, TOKEN)
    runner, port = await server.start(app, "127.0.0.1")
    monkeypatch.setenv(faulty.CHAOS_VARIABLE, str(tmp_path / "chaos" / "learner-0.jsonl"))
    began_s = time.monotonic()
    client = faulty.make_client(
        lambda: time.monotonic() - began_s, f"http://127.0.0.1:{port}", TOKEN, backoff_s=(0.01, 0.05, 0.2)
    )

    def order(kind, **fields):
        fault = Fault(kind=kind, target="learner-0", at_s=0.0, **fields)
        fault.check("here", ["learner-0"])
        faulty.order(tmp_path / "chaos" / "learner-0.jsonl", fault, time.monotonic() - began_s)
        client.weather.look()

    client.order = order
    yield client
    await client.close()
    await runner.cleanup()


async def test_without_orders_there_is_no_such_layer(monkeypatch):
    monkeypatch.delenv(faulty.CHAOS_VARIABLE, raising=False)
    assert type(faulty.make_client(lambda: 0.0, "http://127.0.0.1:1", TOKEN)) is HubClient


async def test_a_chunk_damaged_on_its_way_up_is_refused_by_its_checksum_and_sent_again(client, backend):
    client.order("corrupt", direction="up")
    await client.put_object(NAME, memoryview(BIG))
    assert backend.objects[NAME] == BIG
    assert len(backend.refusals) == 1 and "checksum" in backend.refusals[0]
    assert client.traffic.bytes_up > len(BIG) + len(b"tail")


async def test_a_chunk_damaged_on_its_way_down_is_noticed_and_fetched_again(client, backend):
    client.order("corrupt", direction="down", count=2)
    into = bytearray(len(BIG))
    await client.get_object("fragment.0.1", memoryview(into))
    assert into == BIG and not backend.refusals
    assert client.traffic.bytes_down > len(BIG) + len(b"tail") + 100


async def test_a_repeated_contribution_arrives_twice_bytes_and_message(client, backend):
    link = await client.connect()
    client.order("duplicate")
    await client.put_object(NAME, memoryview(BIG))
    link.send(MESSAGE)
    link.send(msg.Heartbeat())
    await asyncio.sleep(faulty.REPEAT_S + 0.1)
    assert [m for _, m in backend.messages] == [MESSAGE, msg.Heartbeat(), MESSAGE]
    assert client.traffic.bytes_up > len(BIG) + 200  # the hub need not read what it has
    await link.close()


async def test_a_lost_link_ends_at_both_sides_and_bulk_under_way_comes_again(client, backend):
    link = await client.connect()
    client.order("throttle", mbps=400.0, for_s=5.0)
    upload = asyncio.create_task(client.put_object(NAME, memoryview(BIG)))
    await asyncio.sleep(0.05)
    client.order("disconnect")
    assert [m async for m in link] == [] and "lost" in link.reason
    await asyncio.wait_for(backend.gone.wait(), 2)
    await upload
    assert backend.objects[NAME] == BIG
    again = await client.connect()
    again.send(msg.Heartbeat())
    await again.close()
    await link.close()
    assert [m for _, m in backend.messages] == [msg.Heartbeat()]


@pytest.mark.parametrize(("direction", "held"), [("up", True), ("both", True), ("down", False)])
async def test_a_partition_holds_messages_back_in_order_and_loses_none(client, backend, direction, held):
    link = await client.connect()
    client.order("partition", for_s=0.4, direction=direction)
    began_s = time.monotonic()
    sent = [msg.HandedIn(), msg.Heartbeat(), msg.Seeded()]
    for message in sent:
        link.send(message)
    backend.links[0].send(msg.SeedRequest())
    with pytest.raises(Unreachable, match="no way through"):
        await client.connect()
    assert await anext(aiter(link)) == msg.SeedRequest()
    waited_s = time.monotonic() - began_s
    assert (waited_s >= 0.39) == (direction != "up")
    await asyncio.sleep(max(0.0, 0.5 - waited_s))
    assert [m for _, m in backend.messages] == sent
    assert (backend.messages[0][0] - began_s >= 0.39) == held
    await link.close()


async def test_a_request_waits_for_the_end_of_a_partition(client):
    client.order("partition", for_s=0.3, direction="down")
    began_s = time.monotonic()
    await client.get_object("fragment.0.1", memoryview(bytearray(len(BIG))))
    assert time.monotonic() - began_s >= 0.29


async def test_delay_is_added_one_way_for_messages_and_both_ways_for_bulk(client, backend):
    link = await client.connect()
    client.order("delay", latency_s=0.2, for_s=5.0)
    began_s = time.monotonic()
    link.send(msg.Heartbeat())
    await client.get_object("fragment.0.1", memoryview(bytearray(len(BIG))))
    assert time.monotonic() - began_s >= 0.4
    assert 0.2 <= backend.messages[0][0] - began_s < 0.4
    await link.close()


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_thin_line_passes_what_it_can(client, direction):
    client.order("throttle", mbps=160.0, for_s=9.0)  # 8 MiB in 0.42 s
    began_s = time.monotonic()
    if direction == "up":
        await client.put_object(NAME, memoryview(BIG))
    else:
        await client.get_object("fragment.0.1", memoryview(bytearray(len(BIG))))
    assert 0.4 < time.monotonic() - began_s < 5


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_damaged_frame_costs_the_connection_and_is_told(client, backend, direction):
    link = await client.connect()
    client.order("corrupt", what="frame", direction=direction)
    backend.links[0].send(msg.SeedRequest())
    async for _ in link:
        pass
    await link.close()
    await asyncio.wait_for(backend.gone.wait(), 2)
    assert ["control frame" in detail for detail in backend.refusals] == [True] * (direction == "up")


async def test_orders_of_the_past_that_last_still_hold_for_a_new_sidecar(tmp_path):
    path, now = tmp_path / "orders.jsonl", [10.0]
    for fault in (
        Fault(kind="partition", target="learner-0", at_s=8.0, for_s=4.0),
        Fault(kind="duplicate", target="learner-0", at_s=8.0),
    ):
        faulty.order(path, fault, 8.0)
    weather = faulty.Weather(path, lambda: now[0])
    weather.look()
    assert weather.dead and weather.duplicates == 0
    with path.open("ab") as file:
        file.write(b'{"kind":"dupl')  # half a line, while it is being written
    weather.look()
    now[0] = 12.5
    assert not weather.dead and weather.calm()
