"""A learner's own state on its disk: found after a crash, refused when damaged, gone when it cannot be renewed."""

import time
from pathlib import Path

import pytest
import torch
from syncer_helpers import Syncer
from torch import nn

import farflung as ff
from farflung.engine.own_state import Own, digest_of
from farflung.methods import sparseloco
from farflung.protocol.own_state import OwnFragment, OwnState
from farflung.runtime import ownfile

N = 6
METHOD = sparseloco(sync_every_steps=2, codec="top2-fp32-u16-chunk16", lease_s=60.0)


def own() -> Own:
    state, pending = {"m": torch.arange(float(N))}, {"m": torch.ones(N)}
    fragment = OwnFragment(digest=digest_of(state), round=3, pending=digest_of(pending))
    about = OwnState(run="r", incarnation=2, step=40, fragments=[fragment])
    return Own(about=about, tensors={"0.state.m": state["m"], "0.pending.m": pending["m"]})


def test_what_was_written_is_read_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "ada.own.safetensors"
    ownfile.write(path, own())
    found = ownfile.read(path, METHOD, [N])
    assert found.about == own().about
    assert all(torch.equal(found.tensors[name], t) for name, t in own().tensors.items())
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_no_file_is_missing(tmp_path: Path) -> None:
    assert ownfile.read(tmp_path / "x", METHOD, [N]).about == OwnState(problem="missing")


@pytest.mark.parametrize("at", ["length", "header", "last byte", "half", "empty"])
def test_a_file_with_other_bytes_is_damaged(tmp_path: Path, at: str) -> None:
    path = tmp_path / "ada.own.safetensors"
    ownfile.write(path, own())
    data = bytearray(path.read_bytes())
    if at in ("half", "empty"):
        data = data[: len(data) // 2] if at == "half" else bytearray()
    else:
        data[{"length": 0, "header": 20, "last byte": -1}[at]] ^= 1
    path.write_bytes(data)
    assert ownfile.read(path, METHOD, [N]).about == OwnState(problem="damaged")


def test_what_cannot_be_renewed_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older file would be behind what was sent since."""
    path = tmp_path / "ada.own.safetensors"
    ownfile.write(path, own())

    def full(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="no space left on device"):
        ownfile.write(path, own())
    assert list(tmp_path.iterdir()) == []


# ---- a learner -------------------------------------------------------------------------------------------


def work(learner: ff.Learner, model: nn.Module, num_steps: int) -> None:
    for _ in range(num_steps):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        learner.step(num_tokens=1)


def crash(learner: ff.Learner) -> None:
    """As if the process were killed: nothing is said to anybody."""
    assert learner._sidecar.process is not None
    learner._sidecar.process.kill()
    learner._sidecar.process.wait()
    learner._sidecar.close(None)
    learner._workdir.cleanup()


def own_notes(syncer: Syncer) -> list[dict]:
    """What the hub noted of own state, once it has heard that a learner is installed."""
    until_s = time.monotonic() + 30
    while syncer.machine.membership.members["ada"].state != "training" and time.monotonic() < until_s:
        time.sleep(0.01)
    return [n for n in syncer.driver.notes if n["kind"] == "own_state"]


def test_a_killed_learner_goes_on_with_its_own_state(tmp_path: Path) -> None:
    with Syncer(budget_tokens=10**9, method=METHOD) as syncer:
        model = nn.Linear(3, 3)
        old = syncer.learner(model, save_dir=tmp_path)
        work(old, model, 7)
        last = old._island._held[0].state["m"].clone()
        crash(old)
        assert last.any()
        model = nn.Linear(3, 3)
        with syncer.learner(model, save_dir=tmp_path) as new:
            assert torch.equal(new._island._held[0].state["m"], last)
            (note,) = own_notes(syncer)
            assert (note["taken"], note["reason"]) == ("own", "") and 0 <= note["age_steps"] <= 2
            work(new, model, 2)


def test_a_damaged_file_is_refused_by_name_and_counted(tmp_path: Path) -> None:
    with Syncer(budget_tokens=10**9, method=METHOD) as syncer:
        model = nn.Linear(3, 3)
        old = syncer.learner(model, save_dir=tmp_path)
        work(old, model, 5)
        crash(old)
        path = tmp_path / "ada.own.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with syncer.learner(nn.Linear(3, 3), save_dir=tmp_path) as new:
            assert not new._island._held[0].state["m"].any()
            (note,) = own_notes(syncer)
            assert (note["taken"], note["reason"]) == ("zero", "damaged")


def test_a_disk_that_fills_up_does_not_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Syncer(budget_tokens=20, method=METHOD) as syncer:
        model = nn.Linear(3, 3)
        with syncer.learner(model, save_dir=tmp_path) as learner:
            work(learner, model, 3)

            def full(*args: object) -> None:
                raise OSError("no space left on device")

            monkeypatch.setattr("safetensors.torch.save_file", full)
            while not learner.done:
                work(learner, model, 1)
            assert not (tmp_path / "ada.own.safetensors").exists()
            assert learner.end_reason == "finished"


def test_a_run_that_is_finished_leaves_no_own_state(tmp_path: Path) -> None:
    with Syncer(budget_tokens=8, method=METHOD) as syncer:
        model = nn.Linear(3, 3)
        with syncer.learner(model, save_dir=tmp_path) as learner:
            assert (tmp_path / "ada.own.safetensors").exists()
            while not learner.done:
                work(learner, model, 1)
    assert list(tmp_path.iterdir()) == []
