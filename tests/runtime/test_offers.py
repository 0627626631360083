"""Vectors from learner to learner over real sockets: taken where the machine says so, else refused by name."""

import asyncio
import time

import aiohttp
import pytest
from party_helpers import DEADLOCK_S, LOOPBACK, RUN, SIZE, TOKEN, Party, name_of, partner_of

from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import mailbox as box
from farflung.protocol import messages as msg
from farflung.runtime import bulk, chunks
from farflung.runtime.client import HubClient
from farflung.runtime.listen import Listen, choose
from farflung.runtime.transport import Gone, Refused, TransferFailed, Unreachable
from farflung.units import FRAME_BYTES

AUTH = {"Authorization": f"Bearer {TOKEN}"}
VECTOR = bytes(range(250)) * 4
NAMES = "abcd"
FRIEND = partner_of("b", NAMES, 0)  # whom b meets in round 0
STRANGER = next(n for n in NAMES if n not in ("b", FRIEND))
NEXT_STRANGER = next(n for n in NAMES if n not in ("b", partner_of("b", NAMES, 1)))


@pytest.fixture
async def b():
    """A learner in round 0 of epoch 1 with three others, whose processes are not there."""
    async with Party("b") as b:
        b.train(*(Party(n, listen=None) for n in NAMES if n != "b"))
        yield b


@pytest.fixture
async def client(b):
    async with HubClient(b.address, TOKEN, RUN, learner=FRIEND, backoff_s=()) as client:
        yield client


async def half(address, name, data=VECTOR, cut=500):
    """A PUT whose body stops in the middle; returns the answer's task and a function that sends the rest."""
    go_on = asyncio.Event()
    head = chunks.header(0, len(data), await _xxh3(data))

    async def body():
        yield head + data[:cut]
        await go_on.wait()
        yield data[cut:]

    async def put():
        async with aiohttp.ClientSession(headers=AUTH) as session:
            headers = {"Content-Length": str(len(head) + len(data))}
            url = f"{address}/objects/{name}/0"
            async with session.put(url, data=body(), headers=headers) as response:
                return response.status, response.headers.get("X-Farflung-Reason")

    return asyncio.create_task(put()), go_on.set


async def _xxh3(data):
    return await bulk.digest(memoryview(data))


# ---- what is wanted --------------------------------------------------------------------------------------


async def test_a_partners_vector_lies_in_the_slot_that_the_machine_gave(b, client):
    await client.put_object(name_of(FRIEND, "b"), memoryview(VECTOR))
    (admit,) = b.of(act.Admit)
    assert admit.slot is not None and b.slots == {admit.slot: VECTOR}
    framed = SIZE + FRAME_BYTES
    assert b.heard(ev.Arrived) == [ev.Arrived(object=name_of(FRIEND, "b"), num_bytes=framed)]


async def test_a_vector_for_the_next_round_waits_in_a_slot_of_its_own(b, client):
    friend = partner_of("b", NAMES, 1)
    await client.put_object(name_of(FRIEND, "b"), memoryview(VECTOR))
    await client.put_object(name_of(friend, "b", round=1), memoryview(VECTOR[::-1]))
    assert sorted(b.slots.values()) == sorted([VECTOR, VECTOR[::-1]])


async def test_two_learners_meet_and_both_mix():
    async with Party("a") as a, Party("b") as b:
        for party, other in ((a, b), (b, a)):
            party.train(other)
        for party in (a, b):
            party.offer(round=0, step=2)
        for party, mine in ((a, VECTOR), (b, VECTOR[::-1])):
            (offer,) = party.of(act.Offer)
            party.feed(await party.offers.send(offer, memoryview(mine)))
        for party, theirs in ((a, VECTOR[::-1]), (b, VECTOR)):
            mix = next(p.command for p in party.of(act.Post) if isinstance(p.command, box.Mix))
            ((slot, weight),) = mix.parts
            assert party.slots == {slot: theirs} and weight == pytest.approx(0.3)


# ---- what is not -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "reason"), [({"token": "wrong"}, "token"), ({"run_id": "run-2"}, "run")])
async def test_a_stranger_is_turned_away_before_the_machine_hears_of_it(b, options, reason):
    async with HubClient(b.address, **{"token": TOKEN, **options}, backoff_s=()) as client:
        with pytest.raises(Refused) as refused:
            await client.put_object(name_of(FRIEND, "b"), memoryview(VECTOR))
    assert refused.value.reason == reason and not b.heard(ev.Knocked) and not b.slots


@pytest.mark.parametrize(
    "name",
    [
        "contribution.b.1.0.0", "fragment.0.0", "offer", "offer.1.0.a", "offer.1.0.a.b.c", "offer.-1.0.a.b",
        "offer.1.x.a.b", "offer.1.00.a.b", "offer." + "9" * 5000 + ".0.a.b", "offer.1.0.a.b\n", "\0",
        "offer.1.0.ä.b" * 99, "../../etc/passwd",
    ],
)  # fmt: skip
async def test_a_name_that_is_no_vectors_is_refused_before_the_machine_hears_of_it(b, client, name):
    with pytest.raises((Refused, Gone, TransferFailed)) as refused:  # an address may be too long for HTTP
        await client.put_object(name, memoryview(VECTOR))
    assert getattr(refused.value, "reason", "stranger") == "stranger"
    assert not b.heard(ev.Knocked) and not b.slots


@pytest.mark.parametrize("num_bytes", [0, SIZE - 1, SIZE + 1, 9_000_000])
async def test_another_size_is_refused_before_a_byte_is_taken(b, client, num_bytes):
    with pytest.raises(Refused) as refused:
        await client.put_object(name_of(FRIEND, "b"), memoryview(bytes([7]) * num_bytes))
    assert refused.value.reason == "size" and not b.heard(ev.Knocked) and not b.slots


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (name_of(NEXT_STRANGER, "b", round=1), "stranger"),  # not its partner in this round
        (name_of("z", "b", round=1), "stranger"),
        (name_of("b", "b", round=1), "stranger"),
        (name_of(STRANGER, "b"), "late"),
        (name_of(FRIEND, "b", round=2), "early"),
        (name_of(FRIEND, "b", epoch=2), "early"),
        (name_of(FRIEND, "b", epoch=0), "late"),
    ],
)
async def test_the_machine_refuses_by_name(b, client, name, reason):
    with pytest.raises(Refused) as refused:
        await client.put_object(name, memoryview(VECTOR))
    assert refused.value.reason == reason and not b.slots
    assert b.of(act.Admit) == [act.Admit(object=name, slot=None, refusal=reason)]


async def test_whoever_dialled_the_wrong_learner_is_told_that_it_is_not_here(b, client):
    with pytest.raises(Gone, match="this is b"):
        await client.put_object(name_of(FRIEND, "c"), memoryview(VECTOR))
    assert not b.heard(ev.Knocked)


async def test_before_it_belongs_to_a_run_all_come_too_early_and_afterwards_nobody_is_let_in():
    async with Party("b") as b, HubClient(b.address, TOKEN, backoff_s=()) as client:
        reasons = []
        for _ in range(2):
            with pytest.raises(Refused) as refused:
                await client.put_object(name_of("a", "b"), memoryview(VECTOR))
            reasons.append(refused.value.reason)
            b.feed(ev.TrainerGone(reason="gone"))
        assert reasons == ["early", "ended"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/objects/offer.1.0.a.b/0"),
        ("GET", "/ws"),
        ("GET", "/model"),
        ("POST", "/stop"),
        ("GET", "/status"),
    ],
)
async def test_it_serves_nothing(b, method, path):
    async with (
        aiohttp.ClientSession(headers=AUTH) as session,
        session.request(method, b.address + path) as response,
    ):
        assert response.status in (404, 405) and response.headers["X-Farflung-Reason"] == "http"


async def test_a_control_connection_is_not_for_learners(b, client):
    with pytest.raises(Unreachable, match="404"):
        await client.connect()


# ---- broken and hostile bodies ---------------------------------------------------------------------------


async def test_a_body_longer_than_its_header_says_is_cut_off_and_does_not_arrive(b):
    name = name_of(FRIEND, "b")
    body = chunks.header(0, SIZE, 0) + bytes([7]) * (SIZE + 5_000)
    async with (
        aiohttp.ClientSession(headers=AUTH) as session,
        session.put(f"{b.address}/objects/{name}/0", data=body) as response,
    ):
        assert response.status == 400
    assert not b.heard(ev.Arrived) and len(b.slots) <= 1


async def test_a_damaged_vector_does_not_arrive_and_may_be_sent_again(b, client):
    name = name_of(FRIEND, "b")
    body = chunks.header(0, SIZE, 666) + VECTOR
    async with (
        aiohttp.ClientSession(headers=AUTH) as session,
        session.put(f"{b.address}/objects/{name}/0", data=body) as response,
    ):
        assert response.status == 400
    assert not b.heard(ev.Arrived)
    await client.put_object(name, memoryview(VECTOR))
    assert b.heard(ev.Arrived)


async def test_a_replay_of_what_arrived_changes_nothing(b, client):
    name = name_of(FRIEND, "b")
    await client.put_object(name, memoryview(VECTOR))
    before = b.slots
    await client.put_object(name, memoryview(VECTOR[::-1]))
    assert b.slots == before and len(b.heard(ev.Arrived)) == len(b.heard(ev.Knocked)) == 1


async def test_a_replay_after_the_round_changes_nothing(b, client):
    """The slot belongs to a later round by then."""
    await client.put_object(name_of(FRIEND, "b"), memoryview(VECTOR))
    for round in range(2):
        b.boundary(2 * round + 2, tokens=8)
        b.feed(ev.TimerFired(name="meet"))
        b.boundary(
            2 * round + 2, mixed=box.Mixed(round=round, steps=2, tokens=16, distances=[], correction=0.0)
        )
    before = b.slots
    await client.put_object(name_of(FRIEND, "b"), memoryview(VECTOR[::-1]))
    with pytest.raises(Refused, match="late"):
        await client.put_object(name_of(STRANGER, "b"), memoryview(VECTOR[::-1]))
    assert b.slots == before and len(b.heard(ev.Arrived)) == 1


async def test_what_is_on_its_way_when_the_deadline_passes_is_not_written_any_more(b):
    answer, go_on = await half(b.address, name_of(FRIEND, "b"))
    await b.until(ev.Knocked)
    b.boundary(2, tokens=8)
    b.feed(ev.TimerFired(name="meet"))
    assert act.Unexpect(object=name_of(FRIEND, "b")) in b.actions
    before = b.slots
    go_on()
    assert await answer == (409, "superseded")
    assert b.slots == before and not b.heard(ev.Arrived)


async def test_a_vector_that_the_hub_brought_meanwhile_does_not_arrive_twice_as_often(b):
    """Half of it came straight, then its sender thought better of it and sent it through the hub."""
    name = name_of(FRIEND, "b")
    answer, go_on = await half(b.address, name)
    await b.until(ev.Knocked)
    b.hear(msg.Relay(partner=FRIEND, object=name, num_bytes=SIZE))
    (fetch,) = b.of(act.FetchRelay)
    assert fetch.slot == b.of(act.Admit)[0].slot
    b.memory[fetch.slot][:] = VECTOR
    b.feed(ev.Arrived(object=name, num_bytes=SIZE))
    go_on()
    await answer
    assert b.slots == {fetch.slot: VECTOR}


# ---- sending ---------------------------------------------------------------------------------------------


def offer_to(party, partner="b", address=None):
    return act.Offer(
        object=name_of(party.name, partner), partner=partner, address=address or party.address, num_bytes=SIZE
    )


async def test_a_refusal_reaches_the_sender_by_its_name(b):
    async with Party(STRANGER) as stranger:
        stranger.offers.begun(RUN)
        event = await stranger.offers.send(offer_to(stranger, address=b.address), memoryview(VECTOR))
    assert isinstance(event, ev.UploadFailed) and event.refusal == "late"


async def test_whoever_does_not_listen_is_known_at_once():
    async with Party("a") as a, Party("b") as b:
        address = b.address
        await b.offers.close()
        began_s = time.monotonic()
        event = await a.offers.send(offer_to(a, address=address), memoryview(VECTOR))
        assert isinstance(event, ev.UploadFailed) and event.refusal == ""
        assert time.monotonic() - began_s < 0.5


@pytest.mark.parametrize(
    "address",
    ["", "b:7070", "http://[", "http://127.0.0.1:99999", "ftp://127.0.0.1:1", "http://no-such.invalid:1"],
)
async def test_an_address_that_is_none_is_an_offer_that_failed(address):
    async with Party("a") as a:
        offer = act.Offer(object=name_of("a", "b"), partner="b", address=address, num_bytes=SIZE)
        event = await a.offers.send(offer, memoryview(VECTOR))
        assert isinstance(event, ev.UploadFailed) and event.refusal == ""


async def test_an_offer_that_is_cancelled_is_not_told_of():
    async with Party("a") as a, Party("b") as b:
        b.train(a)
        b.offers.admit = lambda action: None  # it never answers: the request ends in a refusal
        sending = asyncio.create_task(a.offers.send(offer_to(a, address=b.address), memoryview(VECTOR)))
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending


async def test_a_partner_that_came_back_elsewhere_is_dialled_there():
    async with Party("a") as a, Party("b") as old:
        a.offers.begun(RUN)
        old.train(a)
        assert isinstance(
            await a.offers.send(offer_to(a, address=old.address), memoryview(VECTOR)), ev.Uploaded
        )
        await old.offers.close()
        async with Party("b") as new:
            new.train(a, epoch=2, round=3)
            offer = act.Offer(
                object=name_of("a", "b", epoch=2, round=3), partner="b", address=new.address, num_bytes=SIZE
            )
            assert isinstance(await a.offers.send(offer, memoryview(VECTOR)), ev.Uploaded)
            assert list(new.slots.values()) == [VECTOR]


async def test_the_join_token_does_not_travel_in_the_clear_where_the_hub_has_tls():
    async with Party("a", url="https://hub.example:1") as a:
        event = await a.offers.send(offer_to(a, address="http://192.0.2.1:7070"), memoryview(VECTOR))
        assert isinstance(event, ev.UploadFailed) and "in the clear" in event.reason


async def test_vectors_pass_through_tls_between_those_who_trust_each_other(certificate):
    cert, key = map(str, certificate)
    tls = choose("127.0.0.1:0", None, hub="https://127.0.0.1:1", cert=cert, key=key, insecure=False)
    hub = {"url": "https://127.0.0.1:1"}
    async with (
        Party("a", ca=cert, **hub) as a,
        Party("a", ca=None, **hub) as distrustful,
        Party("b", ca=cert, cert=cert, key=key, listen=tls, **hub) as b,
    ):
        b.train(a)
        assert b.address.startswith("https://127.0.0.1:")
        event = await distrustful.offers.send(offer_to(a, address=b.address), memoryview(VECTOR))
        assert isinstance(event, ev.UploadFailed) and event.refusal == "" and not b.heard(ev.Knocked)
        plain = b.address.replace("https", "http")
        event = await a.offers.send(offer_to(a, address=plain), memoryview(VECTOR))
        assert isinstance(event, ev.UploadFailed) and not b.heard(ev.Knocked)
        event = await a.offers.send(offer_to(a, address=b.address), memoryview(VECTOR))
        assert isinstance(event, ev.Uploaded) and list(b.slots.values()) == [VECTOR]


# ---- listening -------------------------------------------------------------------------------------------


async def test_who_does_not_listen_or_cannot_has_no_address():
    async with Party("a") as a, Party("b", listen=None) as b:
        port = int(a.address.rpartition(":")[2])
        taken = Listen(host="127.0.0.1", port=port, dial_host="127.0.0.1", dial_port=0, tls=False)
        async with Party("c", listen=taken) as c:
            assert b.offers.address is None and c.offers.address is None
            assert c.machine.header().get("address") is None


async def test_the_address_that_is_advertised_is_the_one_that_partners_dial():
    behind = Listen(host="127.0.0.1", port=0, dial_host="example.org", dial_port=443, tls=False)
    async with Party("a", listen=behind) as a:
        assert a.address == "http://example.org:443"
        assert LOOPBACK.dial_port == 0


async def test_many_partners_at_once():
    """Two-peer matchings and more: each has a slot of its own."""
    names = "abcde"
    policy = {"matching": "complete", "mixing": 0.5, "outer_momentum": 0.5}
    async with asyncio.timeout(DEADLOCK_S), Party("a", policy=policy) as a:
        a.train(*(Party(n, listen=None) for n in names[1:]))
        clients = [HubClient(a.address, TOKEN, RUN, learner=n, backoff_s=()) for n in names[1:]]
        vectors = {n: bytes([ord(n)]) * SIZE for n in names[1:]}
        await asyncio.gather(
            *(
                c.put_object(name_of(n, "a"), memoryview(vectors[n]))
                for c, n in zip(clients, vectors, strict=True)
            )
        )
        assert sorted(a.slots.values()) == sorted(vectors.values())
        for client in clients:
            await client.close()
