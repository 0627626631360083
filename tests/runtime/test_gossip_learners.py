"""Gossip learners of this process with real sidecars: they meet directly, or through the hub, or without it."""

import asyncio
import contextlib
import os
import signal
import threading
import time

import pytest
import torch
from syncer_helpers import TOKEN, Syncer
from torch import nn

import farflung as ff
from farflung.core.fragments import make_plan
from farflung.core.vectors import describe
from farflung.errors import UserError
from farflung.methods import gasloc
from farflung.runtime.client import HubClient
from farflung.runtime.face import _arenas
from farflung.runtime.status import status
from farflung.runtime.transport import Refused, Traffic

PLAIN = {"sync_every_steps": 3, "lease_s": 20.0, "gathers": 0}
DEADLOCK_S = 60.0


class Peer(threading.Thread):
    """A learner and its loop on a thread of its own; `learner` is there once it holds parameters."""

    def __init__(self, syncer: Syncer, name: str, pace_s: float = 0.01, **options) -> None:
        super().__init__(daemon=True)
        self.syncer, self.name_, self.options = syncer, name, {"pace_s": pace_s, **options}
        self.learner: ff.Learner | None = None
        self.enough, self.steps, self.error = threading.Event(), 0, None
        self.start()

    def run(self) -> None:
        model = nn.Linear(8, 8)
        try:
            with self.syncer.learner(model, name=self.name_, **self.options) as learner:
                self.learner = learner
                while not learner.done and not self.enough.is_set():
                    learner.step(num_tokens=1, loss=one_step(model))
                    self.steps += 1
        except BaseException as error:
            self.error = error

    def close(self) -> None:
        self.enough.set()
        self.join(DEADLOCK_S)
        assert not self.is_alive()


def one_step(model: nn.Module) -> float:
    loss = model(torch.ones(4, 8)).pow(2).mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return loss.item()


def until(happened) -> None:
    deadline_s = time.monotonic() + DEADLOCK_S
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@contextlib.contextmanager
def team(*names: str, budget_tokens: int = 10**9, options=None, method=None, **policy):
    """A syncer and its learners, all of them training; ended whatever happens."""
    method = method or gasloc(**{**PLAIN, **policy})
    with Syncer(budget_tokens, method, len(names)) as syncer:
        peers = [Peer(syncer, name, **(options or {}).get(name, {})) for name in names]
        syncer.peers = peers
        try:
            until(lambda: all(p.learner is not None or p.error for p in peers))
            assert [p.error for p in peers] == [None] * len(peers)
            yield syncer
        finally:
            for peer in syncer.peers:
                peer.enough.set()
            for peer in syncer.peers:
                peer.close()


def met(syncer: Syncer, more: int = 1) -> None:
    """Wait until so many more meetings took place."""
    before = syncer.machine.merging.meetings
    until(lambda: syncer.machine.merging.meetings >= before + more)


def notes(syncer: Syncer, kind: str) -> list[dict]:
    return [n for n in syncer.driver.notes if n["kind"] == kind]


# ---- to the end ------------------------------------------------------------------------------------------


def test_a_run_ends_in_order_and_the_hub_holds_the_average_of_what_was_handed_in():
    with team("ada", "bob", "cy", budget_tokens=120, gathers=2) as syncer:
        for peer in syncer.peers:
            peer.join(DEADLOCK_S)
        assert [p.learner.end_reason for p in syncer.peers] == ["finished"] * 3
    gathering, ledger = syncer.machine.merging, syncer.machine.ledger
    assert syncer.machine.phase == "finished" and gathering.half_exchanges == 0
    assert ledger.tokens_trained == ledger.merged >= 120
    assert gathering.meetings > 5 and 0.5 < gathering.bytes_up / gathering.bytes_down < 2
    shown = syncer.driver.hub.shown()
    assert sorted(shown) == ["ada", "bob", "cy"]
    for name, value in syncer.driver.hub.model_tensors().items():
        mean = torch.stack([tensors[name] for tensors in shown.values()]).mean(0)
        assert torch.allclose(value, mean, atol=1e-6)


def test_the_status_says_how_it_goes_and_no_more_than_that():
    with team("ada", "bob", gathers=100, budget_tokens=10_000) as syncer:
        until(lambda: syncer.machine.merging.distance is not None)
        met(syncer)
        said = status(syncer.machine, time.monotonic(), list(syncer.driver.notes), Traffic())
    gossip = said["gossip"]
    assert gossip["epoch"] == 1 and gossip["members"] == 2 and gossip["meetings"] >= 1
    assert gossip["missed"] == {} and gossip["half_exchanges"] == 0
    assert gossip["version"] >= 1 and gossip["distance"] >= 0
    assert said["bytes_up"] > 0 and any("epoch 1" in note["text"] for note in said["notes"])


def test_parameters_that_were_handed_in_are_written_for_whoever_evaluates_them(tmp_path):
    with team("ada", "bob", budget_tokens=30) as syncer:
        for peer in syncer.peers:
            peer.join(DEADLOCK_S)
    syncer.driver.save_shown(tmp_path / "workers")
    assert sorted(p.name for p in (tmp_path / "workers").iterdir()) == ["ada.safetensors", "bob.safetensors"]


# ---- through the hub -------------------------------------------------------------------------------------

UNREACHABLE = {
    "nobody listens": {"listen": "off"},
    "nobody gets through": {"listen": "127.0.0.1:0", "advertise": "127.0.0.1:1"},
}


@pytest.mark.parametrize("options", UNREACHABLE.values(), ids=UNREACHABLE)
def test_who_cannot_be_dialled_is_reached_through_the_hub(options):
    names = ("ada", "bob", "cy")
    with team(*names, options=dict.fromkeys(names, options)) as syncer:
        met(syncer, 6)
        gathering = syncer.machine.merging
        assert gathering.missed == {} and gathering.bytes_up == gathering.bytes_down == 0
        lying = [n for n in syncer.driver._objects if n.startswith("offer.")]
        assert len(lying) <= 3, "what was fetched is let go of"


def test_the_hub_keeps_only_vectors_between_its_members_and_of_their_newest_round():
    """Rounds far ahead, so that the learners' own vectors are not in the way."""
    with team("ada", "bob") as syncer:
        num_bytes = 144  # 72 numbers in bf16
        asyncio.run(hostile_offers(syncer, num_bytes))
        lying = [n for n in syncer.driver._objects if n.startswith("offer.")]
        assert lying == ["offer.9.9.ada.bob"]
        syncer.peers[0].close()
        until(lambda: not any(n.startswith("offer.") for n in syncer.driver._objects))


async def hostile_offers(syncer: Syncer, num_bytes: int) -> None:
    async def put(name: str, size: int = num_bytes, token: str = TOKEN) -> str:
        async with HubClient(syncer.url, token, backoff_s=()) as client:
            try:
                await client.put_object(name, memoryview(bytes(size)))
            except Refused as error:
                return error.reason
            return ""

    assert await put("offer.9.8.ada.bob") == ""
    assert await put("offer.9.9.ada.bob", token="wrong") == "token"
    assert await put("offer.9.9.ada.bob", num_bytes + 2) == "size"
    strange = [
        "offer.9.9.eve.bob",
        "offer.9.9.ada.eve",
        "offer.9.9.ada",
        "offer.9.x.ada.bob",
        "offer.9.9.ada.bob.1",
    ]
    assert [await put(name) for name in strange] == ["object"] * len(strange)
    assert await put("offer.9.9.ada.bob") == ""
    assert await put("offer.9.8.ada.bob") == "object"


def test_one_that_does_not_listen_meets_others_that_do():
    with team("ada", "bob", "cy", options={"ada": {"listen": "off"}}) as syncer:
        met(syncer, 8)
        gathering = syncer.machine.merging
        assert gathering.missed == {} and gathering.bytes_up > 0
        assert {syncer.machine.membership.members[n].address is None for n in ("bob", "cy")} == {False}


# ---- trouble ---------------------------------------------------------------------------------------------


def test_without_the_hub_learners_go_on_meeting_in_the_last_epoch(tmp_path):
    options = {n: {"tape_path": tmp_path / f"{n}.jsonl"} for n in ("ada", "bob")}
    with team("ada", "bob", options=options) as syncer:
        met(syncer, 3)
        syncer.stop()
        before = [p.steps for p in syncer.peers]
        mixed = (tmp_path / "ada.jsonl").read_text().count('"mixed":{')
        until(lambda: all(p.steps > b + 30 for p, b in zip(syncer.peers, before, strict=True)))
        text = (tmp_path / "ada.jsonl").read_text()
        assert text.count('"mixed":{') > mixed + 5 and '"deadline"' not in text
        assert not any(p.learner.done for p in syncer.peers)


def test_a_learner_that_died_comes_back_warm_and_proven_and_is_met_again():
    with team("ada", "bob", "cy", lease_s=5.0) as syncer:
        met(syncer, 6)
        ada = syncer.peers[0]
        died(ada)
        syncer.peers.append(Peer(syncer, "ada"))
        until(lambda: notes(syncer, "rejoined"))
        (proved,) = [n for n in notes(syncer, "rejoin_proved") if n["role"] == "rejoin"]
        assert proved["learner"] == "ada" and proved["state"] == "warm" and proved["donor"] in ("bob", "cy")
        assert all(proved[f"{what}_equal"] for what in ("params", "inner", "lr", "cursor"))
        assert syncer.machine.merging.members == ["ada", "bob", "cy"]
        assert set(syncer.machine.merging.missed) <= {"unreachable", "lost", "deadline", "late", "ended"}


def died(peer: Peer) -> None:
    """Its process is gone with its sidecar, without a word."""
    peer.learner._sidecar.process.kill()
    peer.learner._sidecar.bury = lambda: (_ for _ in ()).throw(SystemExit("killed"))
    peer.close()


def test_a_learner_whose_sidecar_crashed_is_met_again_where_the_new_one_listens():
    with team("ada", "bob") as syncer:
        met(syncer, 3)
        ada, member = syncer.peers[0], syncer.machine.membership.members["ada"]
        old, moved = member.address, syncer.machine.merging.bytes_up
        os.kill(ada.learner._sidecar.process.pid, signal.SIGKILL)
        until(lambda: member.address != old)
        met(syncer, 3)
        assert ada.error is None and syncer.machine.merging.epoch == 2
        assert member.incarnation == 1 and syncer.machine.merging.bytes_up > moved


def test_a_learner_that_comes_late_is_in_the_next_epoch():
    with team("ada", "bob") as syncer:
        met(syncer, 3)
        syncer.peers.append(Peer(syncer, "cy"))
        until(lambda: syncer.machine.merging.members == ["ada", "bob", "cy"])
        met(syncer, 4)
        (joined,) = [n for n in notes(syncer, "rejoin_proved") if n["learner"] == "cy"]
        assert joined["state"] == "warm"


# ---- memory and mistakes ---------------------------------------------------------------------------------


def test_slots_for_partners_cost_nothing_until_they_are_written():
    model = nn.Linear(4000, 1000)  # 16 MB, 129 slots
    up, down = _arenas(make_plan(describe(model), 1), gasloc())
    assert len(up.sizes) == 2 and len(down.sizes) == 129
    assert os.fstat(down.fd).st_size > 1e9 and os.fstat(down.fd).st_blocks == 0
    down.slot(128)[-1] = 7
    assert os.fstat(down.fd).st_blocks <= 16
    up.close()
    down.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"listen": "here"}, None),
        ({"listen": "127.0.0.1:x"}, "listen = '127.0.0.1:x': write HOST:PORT"),
        ({"listen": "127.0.0.1:70000"}, "listen = '127.0.0.1:70000': write HOST:PORT"),
        ({"listen": "0.0.0.0:0"}, "without TLS"),
        ({"listen": "0.0.0.0:0", "insecure": True}, "give advertise"),
        ({"listen": "0.0.0.0:0", "insecure": True, "advertise": "http://x"}, "advertise = 'http://x': write"),
        ({"advertise": "example.org"}, "advertise = 'example.org' has no effect without listen"),
        ({"listen": "127.0.0.1:0", "cert": "no.pem", "key": "no.key"}, "TLS certificate no.pem"),
    ],
)
def test_a_mistake_is_told_at_once(options, message):
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match=message or "without TLS"):
        ff.Learner(
            model, torch.optim.SGD(model.parameters()), gasloc(), connect="http://127.0.0.1:1", token=TOKEN,
            **options,
        )  # fmt: skip


def test_a_method_with_a_hub_has_nobody_to_listen_for():
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match="no effect on decoupled"):
        ff.Learner(
            model, torch.optim.SGD(model.parameters()), ff.methods.decoupled(num_fragments=1),
            connect="http://127.0.0.1:1", token=TOKEN, listen="127.0.0.1:0",
        )  # fmt: skip
