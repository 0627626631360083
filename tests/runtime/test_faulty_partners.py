"""Bad weather on a learner's link: it befalls what partners send each other, at either end."""

import asyncio
import time

import pytest
from party_helpers import HUB, RUN, TOKEN, Party, name_of

from farflung.chaos.plan import Fault
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.runtime import faulty
from farflung.runtime.client import HubClient

SIZE = 200_000  # 0.2 s at 8 Mbit/s
VECTOR = bytes(range(250)) * (SIZE // 250)
NAME = name_of("a", "b")


class Sky:
    """The weather of one learner's link: `order` lets a fault happen now."""

    def __init__(self, path, monkeypatch) -> None:
        self._path, self._began_s = path, time.monotonic()
        monkeypatch.setenv(faulty.CHAOS_VARIABLE, str(path))
        self.client = faulty.make_client(self.clock, HUB, TOKEN)
        monkeypatch.delenv(faulty.CHAOS_VARIABLE)

    def clock(self) -> float:
        return time.monotonic() - self._began_s

    def order(self, kind, **fields) -> None:
        fault = Fault(kind=kind, target="learner-0", at_s=0.0, **fields)
        fault.check("here", ["learner-0"])
        faulty.order(self._path, fault, self.clock())
        self.client.weather.look()


class Pair:
    """a offers to b; one of them has a sky."""

    def __init__(self, a: Party, b: Party, sky: Sky) -> None:
        self.a, self.b, self.order = a, b, sky.order

    async def send(self) -> tuple[ev.LearnerEvent, float]:
        """What became of a's vector, and after how many seconds."""
        offer = act.Offer(object=NAME, partner="b", address=self.b.address, num_bytes=SIZE)
        began_s = time.monotonic()
        event = await self.a.offers.send(offer, memoryview(VECTOR))
        return event, time.monotonic() - began_s

    @property
    def arrived(self) -> bool:
        return list(self.b.slots.values()) == [VECTOR] and len(self.b.heard(ev.Arrived)) == 1


@pytest.fixture(params=["sender", "receiver"])
async def pair(request, tmp_path, monkeypatch):
    sky = Sky(tmp_path / "orders.jsonl", monkeypatch)
    skies = {"sender": (sky.client, None), "receiver": (None, sky.client)}[request.param]
    async with Party("a", skies[0], SIZE) as a, Party("b", skies[1], SIZE) as b:
        a.offers.begun(RUN)
        b.train(a)
        pair = Pair(a, b, sky)
        pair.end = request.param
        yield pair


async def test_without_orders_there_is_no_such_layer():
    async with HubClient(HUB, TOKEN) as hub:
        assert type(faulty.make_partner_client(hub, HUB, TOKEN)) is HubClient


async def test_in_fair_weather_a_vector_arrives(pair):
    event, _ = await pair.send()
    assert isinstance(event, ev.Uploaded) and pair.arrived


async def test_a_throttled_line_holds_up_what_goes_to_partners_and_comes_from_them(pair):
    pair.order("throttle", mbps=8.0, for_s=20.0)
    event, took_s = await pair.send()
    assert isinstance(event, ev.Uploaded) and pair.arrived and took_s > 0.19


async def test_a_delay_holds_up_a_request_there_and_back(pair):
    pair.order("delay", latency_s=0.1, for_s=20.0)
    event, took_s = await pair.send()
    assert isinstance(event, ev.Uploaded) and pair.arrived and took_s > 0.19


async def test_behind_a_short_partition_a_vector_arrives_late(pair):
    pair.order("partition", for_s=0.3)
    event, took_s = await pair.send()
    assert isinstance(event, ev.Uploaded) and pair.arrived and took_s > 0.28


async def test_who_is_cut_off_reaches_nobody_and_knows_it_soon(pair, monkeypatch):
    monkeypatch.setattr(faulty.FaultyPartner, "patience_s", 0.1)
    pair.order("partition", for_s=20.0)
    if pair.end == "sender":
        event, took_s = await pair.send()
        assert isinstance(event, ev.UploadFailed) and event.refusal == "" and took_s < 1.0
    else:  # the other side cannot tell it from a slow one: its deadline will
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pair.send(), 0.3)
    assert not pair.b.heard(ev.Knocked)


async def test_a_damaged_vector_is_noticed_and_sent_again(pair):
    pair.order("corrupt", direction="up" if pair.end == "sender" else "down", count=2)
    event, _ = await pair.send()
    assert isinstance(event, ev.Uploaded) and pair.arrived


async def test_a_lost_link_loses_what_is_on_its_way_and_it_is_sent_again(pair):
    pair.order("throttle", mbps=4.0, for_s=20.0)
    sending = asyncio.create_task(pair.send())
    await pair.b.until(ev.Knocked)
    pair.order("disconnect")
    event, took_s = await sending
    assert isinstance(event, ev.Uploaded) and pair.arrived and took_s > 0.4


async def test_a_repeated_vector_arrives_once(pair):
    pair.order("duplicate")
    event, _ = await pair.send()
    assert isinstance(event, ev.Uploaded) and pair.arrived


async def test_one_thin_line_carries_both_directions_and_all_partners(tmp_path, monkeypatch):
    """Two vectors at once take as long as both together."""
    sky = Sky(tmp_path / "orders.jsonl", monkeypatch)
    policy = {"matching": "complete", "mixing": 0.5, "outer_momentum": 0.5}
    async with (
        Party("a", sky.client, SIZE, policy) as a,
        Party("b", None, SIZE, policy) as b,
        Party("c", None, SIZE, policy) as c,
    ):
        for one, others in ((b, (a, c)), (c, (a, b))):
            one.train(*others)
        a.offers.begun(RUN)
        sky.order("throttle", mbps=8.0, for_s=20.0)
        offers = [
            act.Offer(object=name_of("a", p.name), partner=p.name, address=p.address, num_bytes=SIZE)
            for p in (b, c)
        ]
        began_s = time.monotonic()
        await asyncio.gather(*(a.offers.send(offer, memoryview(VECTOR)) for offer in offers))
        assert time.monotonic() - began_s > 0.38
        assert list(b.slots.values()) == list(c.slots.values()) == [VECTOR]
