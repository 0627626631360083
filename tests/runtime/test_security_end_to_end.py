"""A syncer behind real sockets, and clients that are wrong, broken or hostile: each changes nothing, is counted,
and is told why (P1, P6, P13)."""

import asyncio
import json
import math
import time
from collections.abc import Callable

import aiohttp
import msgspec
import pytest
import safetensors.torch
import torch
from torch import nn

from farflung.core.fragments import make_plan
from farflung.core.vectors import describe
from farflung.engine.buffers import digest
from farflung.methods import decoupled
from farflung.protocol import messages as msg
from farflung.protocol import objects
from farflung.protocol.syncer import SyncerMachine
from farflung.runtime import server
from farflung.runtime.client import ControlLink, HubClient
from farflung.runtime.syncer import SyncerDriver
from farflung.runtime.transport import Refused

TOKEN, RUN = "open-sesame", "run-1"
DEADLOCK_S = 20.0
AUTH = {"Authorization": f"Bearer {TOKEN}"}
PLAIN = {"num_fragments": 1, "sync_every_steps": 1, "overlap_steps": 0, "lease_s": 1000.0, "grace_gamma": 0.0}
MODEL = nn.Linear(2, 1)
PLAN = make_plan(describe(MODEL), 1)
THETA_N = torch.tensor([1.0, 2.0, 3.0])  # bias and weight, in name order
SIZE_BYTES = 12  # of a payload and of a value


class Hand:
    """A learner played by hand over real sockets."""

    def __init__(self, url: str, name: str, method: str) -> None:
        self.method = method
        self.name, self.client = name, HubClient(url, TOKEN, RUN, learner=name, backoff_s=())
        self.link: ControlLink
        self.incarnation, self.sequence = 0, 0

    async def call(self, **changes) -> None:
        """Connect and ask to be let in."""
        self.link = await self.client.connect()
        self.heard = self.link.__aiter__()
        join = msg.Join(
            protocol=msg.PROTOCOL, run=RUN, learner=self.name, fingerprint=PLAN.fingerprint(),
            layout=PLAN.to_json(), method=self.method,
        )  # fmt: skip
        self.link.send(msgspec.structs.replace(join, **changes))

    async def hear(self, kind: type) -> msg.Message:
        """The next message of a kind."""
        async with asyncio.timeout(DEADLOCK_S):
            async for message in self.heard:
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"no {kind.__name__}: {self.link.reason}")

    async def enter(self) -> None:
        await self.call()
        self.incarnation = (await self.hear(msg.Welcome)).incarnation

    async def put(self, name: str, values_N: torch.Tensor) -> None:
        await self.client.put_object(name, memoryview(values_N.numpy().tobytes()))

    async def seed(self) -> None:
        await self.hear(msg.SeedRequest)
        await self.put(objects.seed(self.name, self.incarnation, 0), THETA_N)
        self.link.send(msg.Seeded())
        await self.install()

    async def install(self) -> None:
        asked = await self.hear(msg.Install)
        self.link.send(
            msg.Installed(
                versions=asked.versions, digests=[digest(THETA_N)], inner_digest=None, lr=None,
                cursor=asked.cursor, step=asked.step,
            )
        )  # fmt: skip

    def boundary(self, *snapshots: tuple[int, int]) -> None:
        self.sequence += 1
        self.link.send(
            msg.Boundary(
                sequence=self.sequence, step=self.sequence, tokens=10, step_s=0.01, snapshots=list(snapshots)
            )
        )

    async def contribute(self, round: int, payload_N: torch.Tensor, base: int = 0) -> msg.FateOf:
        """Send one contribution and wait for its fate."""
        await self.put(objects.contribution(self.name, self.incarnation, 0, round), payload_N)
        self.link.send(self.contribution(round, base))
        return await self.hear(msg.FateOf)

    def contribution(self, round: int, base: int = 0) -> msg.Contribute:
        return msg.Contribute(
            fragment=0, round=round, base_version=base, steps=1, tokens=10, num_bytes=SIZE_BYTES
        )

    async def close(self) -> None:
        if hasattr(self, "link"):
            await self.link.close()
        await self.client.close()


@pytest.fixture
def method():
    return decoupled(**PLAIN)


@pytest.fixture
async def driver(method):
    machine = SyncerMachine(method.policy, run=RUN, num_learners=1, budget_tokens=10**9)
    driver = SyncerDriver(method, machine, time.monotonic, None)
    yield driver
    machine.validate()
    driver.close()


@pytest.fixture
async def url(driver):
    runner, port = await server.start(driver.application(TOKEN), "127.0.0.1")
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


@pytest.fixture
async def hand(url, method) -> Callable[[str], Hand]:
    hands = []

    def make(name: str) -> Hand:
        hands.append(Hand(url, name, f"decoupled:{method.policy.digest()}"))
        return hands[-1]

    yield make
    for each in hands:
        await each.close()


async def until(happened: Callable[[], bool]) -> None:
    """Let the loop turn until something has happened at the syncer."""
    async with asyncio.timeout(DEADLOCK_S):
        while not happened():
            await asyncio.sleep(0)


@pytest.fixture
async def ada(hand, driver) -> Hand:
    """An honest learner that trains, with an open invitation to round `ada.round`."""
    ada = hand("ada")
    await ada.enter()
    await ada.seed()
    ada.boundary()
    ada.round = (await ada.hear(msg.Invite)).round
    ada.boundary((0, ada.round))
    await until(lambda: driver.machine.ledger.tokens_trained == 20)
    return ada


@pytest.fixture
def state(driver):
    """What no stranger may change: versions, digests, members, ledger."""

    def now():
        machine = driver.machine
        return (
            list(machine.merging.versions), dict(machine.merging.digests), machine.ledger.summary(),
            [(m.name, m.state, m.incarnation) for m in machine.membership.sorted()],
            None if driver.hub is None else driver.hub.model_tensors()["weight"].tolist(),
            sorted(driver._objects), sorted(driver._arriving),
        )  # fmt: skip

    return now


# ---- strangers -------------------------------------------------------------------------------------------

ROUTES = [
    ("GET", "/ws"), ("GET", "/status"), ("GET", "/model"), ("POST", "/stop"), ("POST", "/stop?mode=finish"),
    ("PUT", "/objects/seed.ada.1.0/0"), ("GET", "/objects/fragment.0.0/0"), ("HEAD", "/objects/fragment.0.0"),
    ("GET", "/nothing/here"),
]  # fmt: skip


@pytest.mark.parametrize(("verb", "path"), ROUTES)
@pytest.mark.parametrize(
    ("headers", "status", "reason"),
    [
        ({}, 401, "token"),
        ({"Authorization": "Bearer open-sesam"}, 401, "token"),
        ({"Authorization": f"Basic {TOKEN}"}, 401, "token"),
        (AUTH | {"X-Farflung-Run": "run-2"}, 403, "run"),
    ],
    ids=["no token", "wrong token", "wrong scheme", "foreign run"],
)
async def test_a_stranger_changes_nothing_on_any_route(
    url, driver, ada, state, verb, path, headers, status, reason
):
    before = state()
    request = aiohttp.request(verb, f"{url}{path}", headers=headers, data=b"x")
    async with request as response:
        assert response.status == status
        assert response.headers["X-Farflung-Reason"] == reason
        if verb != "HEAD":
            assert (await response.json())["reason"] == reason
    assert driver.machine.refused == {reason: 1}
    assert driver.machine.phase == "training"
    assert state() == before


async def test_what_was_refused_is_shown_in_the_status(url, ada):
    wrong = HubClient(url, "wrong")
    with pytest.raises(Refused, match=r"refused \(token\): the join token is missing or wrong"):
        await wrong.connect()
    with pytest.raises(Refused):
        await wrong.call("GET", "/status")
    await wrong.close()
    shown = await ada.client.call("GET", "/status")
    assert shown["refused"] == {"token": 2}
    assert any("refused unknown: token" in note["text"] for note in shown["notes"])


# ---- joining ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason", "detail"),
    [
        ({"protocol": 99}, "protocol", "you speak protocol 99"),
        ({"run": "run-2"}, "run", "you belong to run 'run-2', this syncer serves 'run-1'"),
        ({"method": "diloco:00000000"}, "method", "your method is diloco:00000000, this run uses decoupled:"),
        (
            {"fingerprint": "other"},
            "fingerprint",
            "your model (names, shapes, dtypes, fragment plan) differs",
        ),
        ({"incarnation": 7}, "fenced", "incarnation 7 was replaced"),
        ({"learner": "no.dots"}, "layout", "learner name 'no.dots'"),
    ],
)
async def test_a_learner_of_another_kind_is_told_why_and_others_go_on(
    hand, driver, ada, state, changes, reason, detail
):
    before, eve = state(), hand("eve")
    await eve.call(**changes)
    answer = await eve.hear(msg.Refused)
    assert answer.reason == reason and detail in answer.detail
    assert driver.machine.refused == {reason: 1}
    assert state() == before
    assert (await ada.contribute(ada.round, torch.zeros(3))).fate == "merged"


async def test_a_refused_model_does_not_shape_the_run(hand, driver):
    eve, ada = hand("eve"), hand("ada")
    other = make_plan(describe(nn.Linear(5, 5)), 1)
    await eve.call(run="run-2", fingerprint=other.fingerprint(), layout=other.to_json())
    assert (await eve.hear(msg.Refused)).reason == "run"
    await ada.enter()
    await ada.seed()
    assert driver.hub.model_tensors()["weight"].tolist() == [[2.0, 3.0]]


@pytest.mark.parametrize(
    "layout", ["", "{}", "[1]", PLAN.to_json()[:-9], make_plan(describe(MODEL), 2).to_json()]
)
async def test_a_layout_that_is_none_is_refused(hand, driver, layout):
    eve = hand("eve")
    await eve.call(layout=layout)
    assert (await eve.hear(msg.Refused)).reason == "layout"
    assert driver.machine.refused == {"layout": 1} and driver.machine.membership.sorted() == []


# ---- frames ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", b"\x80", b'{"type":"Leave"}', bytes([0xDD, 255, 255, 255, 255])], ids=repr
)
async def test_a_malformed_frame_costs_only_its_connection(url, driver, ada, state, frame):
    before = state()
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/ws", headers=AUTH) as socket:
        await socket.send_bytes(frame)
        end = await socket.receive()
    assert end.type is aiohttp.WSMsgType.CLOSE and end.extra
    await until(lambda: driver.machine.refused == {"frame": 1})
    assert state() == before
    assert (await ada.contribute(ada.round, torch.zeros(3))).fate == "merged"


async def test_messages_before_join_are_refused(hand, driver, ada, state):
    before, eve = state(), hand("eve")
    eve.link = await eve.client.connect()
    eve.heard = eve.link.__aiter__()
    for message in (eve.contribution(1), msg.Seeded(), msg.Leave(reason="x"), msg.HandedIn()):
        eve.link.send(message)
    await until(lambda: driver.machine.refused == {"not_joined": 4})
    assert state() == before


# ---- objects ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "contribution.eve.1.0.1", "contribution.ada.2.0.1", "contribution.ada.1.1.1", "contribution.ada.1.0",
        "contribution.ada.1.-1.1", "contribution.ada.1.0.x", "seed.ada.1.0", "seed.ada.1.9", "fragment.0.0",
        "state.ada.1.eve", "../../etc/passwd", "contribution", ".", "contribution.ada.1.0.1.1", "\u00b2",
        "contribution.ada.1.\u00b2.1",
    ],
)  # fmt: skip
async def test_an_object_that_nobody_expects_is_turned_away(ada, driver, state, name):
    before = state()
    with pytest.raises(Refused, match="not expected here"):
        await ada.client.put_object(name, memoryview(bytes(SIZE_BYTES)))
    assert driver.machine.refused == {"object": 1}
    assert state() == before


@pytest.mark.parametrize("num_bytes", [0, 11, 13, 1 << 20])
async def test_an_object_of_the_wrong_size_is_turned_away(ada, driver, state, num_bytes):
    before = state()
    name = objects.contribution("ada", 1, 0, ada.round)
    with pytest.raises(Refused, match=f"{num_bytes} bytes, {SIZE_BYTES} expected"):
        await ada.client.put_object(name, memoryview(bytes(num_bytes)))
    assert driver.machine.refused == {"size": 1}
    assert state() == before


@pytest.mark.parametrize(
    "path", ["fragment.0.7", "fragment.9.0", "fragment.0", "state.x", "seed.ada.1.0", "x"]
)
async def test_an_object_that_is_not_there_is_gone(url, path, ada):
    async with aiohttp.request("GET", f"{url}/objects/{path}/0", headers=AUTH) as response:
        assert (response.status, (await response.json())["reason"]) == (404, "gone")


# ---- contributions ---------------------------------------------------------------------------------------


async def test_an_honest_contribution_is_merged(ada, driver, state):
    before = state()
    fate = await ada.contribute(ada.round, torch.tensor([1.0, 1.0, 1.0]))
    assert (fate.fate, fate.round) == ("merged", ada.round)
    assert driver.machine.refused == {} and driver.machine.merging.versions == [1]
    assert state()[4] != before[4]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_a_contribution_that_is_not_finite_is_refused(ada, driver, state, value):
    before = state()
    fate = await ada.contribute(ada.round, torch.tensor([1.0, value, 1.0]))
    assert (fate.fate, fate.reason) == ("rejected", "non_finite")
    assert driver.machine.refused == {"non_finite": 1}
    assert state() == before


@pytest.mark.parametrize("base", [-1, 1, 10**12])
async def test_a_base_version_that_was_never_announced_is_refused(ada, driver, state, base):
    before = state()
    fate = await ada.contribute(ada.round, torch.ones(3), base=base)
    assert fate.fate == "rejected" and f"base version {base} was never announced to you" in fate.reason
    assert driver.machine.refused == {"base": 1}
    assert state() == before


async def test_a_contribution_without_its_object_is_refused(ada, driver):
    ada.link.send(ada.contribution(ada.round))
    fate = await ada.hear(msg.FateOf)
    assert fate.fate == "rejected" and "missing: the object never arrived whole" in fate.reason
    assert driver.machine.refused == {"missing": 1}


async def test_a_repeated_contribution_is_merged_once(ada, driver, state):
    await ada.contribute(ada.round, torch.ones(3))
    before = state()
    fate = await ada.contribute(ada.round, torch.full((3,), 100.0))
    assert (fate.fate, fate.reason) == ("merged", "repeat")
    assert driver.machine.refused == {"repeat": 1}
    assert state() == before
    assert driver.hub._fragments[0]._waiting == {}


@pytest.mark.parametrize("method", [decoupled(**PLAIN, quorum=2)], ids=["quorum of two"])
async def test_a_repeat_does_not_replace_what_lies_in_the_round(hand, driver):
    """The first contribution waits for the second one, and its sender sends other bytes under the same id."""
    ada, bob = hand("ada"), hand("bob")
    await ada.enter()
    await bob.enter()
    await ada.seed()
    await bob.install()
    for each in (ada, bob):
        each.boundary()
        each.round = (await each.hear(msg.Invite)).round
        each.boundary((0, each.round))
    name = objects.contribution("ada", 1, 0, ada.round)
    await ada.put(name, torch.ones(3))
    ada.link.send(ada.contribution(ada.round))
    await ada.put(name, torch.full((3,), math.nan))
    ada.link.send(ada.contribution(ada.round))
    assert (await bob.contribute(bob.round, torch.ones(3))).fate == "merged"
    assert (await ada.hear(msg.FateOf)).fate == "merged"
    assert driver.machine.refused == {"repeat": 1}
    assert all(map(math.isfinite, driver.hub.model_tensors()["weight"].flatten().tolist()))


async def test_what_a_lost_learner_had_begun_to_send_is_forgotten(ada, driver):
    await ada.put(objects.contribution("ada", 1, 0, 77), torch.ones(3))
    assert driver._objects
    ada.link.send(msg.TrainerLost(reason="killed"))
    await until(lambda: driver.machine.membership.members["ada"].state == "gone")
    assert driver._objects == {} and driver._arriving == {}


# ---- the model -------------------------------------------------------------------------------------------


async def test_the_model_is_there_once_the_run_has_one(url, hand, driver):
    ada = hand("ada")
    await ada.enter()
    async with aiohttp.ClientSession(headers=AUTH) as session:
        async with session.get(f"{url}/model") as response:
            assert response.status == 409
            assert json.loads(await response.text())["detail"] == "there are no parameters yet"
        await ada.seed()
        ada.boundary()
        await ada.hear(msg.Invite)
        async with session.get(f"{url}/model") as response:
            tensors = safetensors.torch.load(await response.read())
            assert response.headers["X-Farflung-Versions"] == "0"
    assert tensors["weight"].tolist() == [[2.0, 3.0]] and tensors["bias"].tolist() == [1.0]
