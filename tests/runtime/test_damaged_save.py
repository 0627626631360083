"""A save file that cannot be read: told by name, set aside, and the learner rejoins as a new process does."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from syncer_helpers import Syncer
from test_own_file import crash, work
from torch import nn

import farflung as ff
from farflung.config import resolve
from farflung.recipe import make_recipe
from farflung.runtime import run, savefile


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def no_header(path: Path) -> None:
    path.write_bytes(b"\0" * 100)


def rewrite(path: Path, change) -> None:
    with safetensors.safe_open(path, "pt") as file:
        meta = file.metadata()
    tensors = safetensors.torch.load_file(path)
    change(tensors, meta)
    safetensors.torch.save_file(tensors, path, meta)


def inner_state(path: Path) -> None:
    """Model and island are fine: they are read before it."""
    rewrite(path, lambda tensors, meta: tensors["inner"].fill_(0))


def no_position(path: Path) -> None:
    def change(tensors, meta) -> None:
        found = json.loads(meta["farflung"])
        del found["cursor"]
        meta["farflung"] = json.dumps(found)

    rewrite(path, change)


def no_island(path: Path) -> None:
    rewrite(path, lambda tensors, meta: tensors.pop("island.1.base"))


def learner(syncer: Syncer, folder: Path) -> ff.Learner:
    model = nn.Linear(3, 3)
    return syncer.learner(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), save_dir=folder)


@pytest.fixture
def saved(tmp_path: Path):
    """A run whose learner ada wrote its state and is gone; the syncer still waits for it."""
    with Syncer(budget_tokens=10**9) as syncer:
        old = learner(syncer, tmp_path)
        work(old, old._model, 6)
        old._save()
        crash(old)
        yield syncer, tmp_path / "ada.safetensors"


@pytest.mark.parametrize("damage", [cut, no_header, inner_state, no_position, no_island])
def test_it_rejoins_without_what_it_was(saved, damage, capfd) -> None:
    syncer, path = saved
    damage(path)
    with learner(syncer, path.parent) as new:
        assert new.trainer.begun is not None
        assert (new.trainer.begun.incarnation, new.index) == (2, 0)  # a whole file makes it go on as 1
        assert not path.exists() and (path.parent / "ada.safetensors.damaged").exists()
        assert not new._inner.optimizer.state  # nothing of the file was kept
        work(new, new._model, 2)
    lines = [line for line in capfd.readouterr().err.splitlines() if "damaged" in line]
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"ada: {path} is damaged (")
    assert lines[0].endswith("): it rejoins from the syncer and a donor")


def test_a_whole_file_goes_on_as_before(saved) -> None:
    syncer, path = saved
    with learner(syncer, path.parent) as new:
        assert new.trainer.begun is not None and new.trainer.begun.incarnation == 1
        assert new._island.step == 6


@pytest.mark.parametrize("damage", [cut, inner_state, no_position, no_island])
def test_a_learner_is_as_it_was_before_a_file_that_could_not_be_read(saved, damage) -> None:
    syncer, path = saved
    with learner(syncer, path.parent) as other:  # takes the file; writes one of its own
        work(other, other._model, 3)
        other._save()
        damage(path)
        work(other, other._model, 3)
        other._inner.cursor = 77
        before = savefile._tensors(other._model, other._island, other._inner)
        before = {name: t.clone() for name, t in before.items()}
        with pytest.raises(savefile.Damaged, match=r"ada\.safetensors is damaged \("):
            savefile.read(path, other._model, other._island, other._inner, other.trainer)
        after = savefile._tensors(other._model, other._island, other._inner)
        assert before.keys() == after.keys() and other._inner.cursor == 77
        assert all(torch.equal(before[name], after[name]) for name in before)


async def test_a_resumed_run_shows_what_a_learner_says_of_its_file(tmp_path: Path) -> None:
    config = resolve(make_recipe({"budget_tokens": 9, "num_learners": 2}), "run", trains=False)
    supervisor = run.Supervisor(config, tmp_path, resume=True, show=lambda status: None)
    supervisor._metrics.close()
    supervisor._log_starts = {"learner-0": 4, "learner-1": 0}
    (tmp_path / "logs").mkdir()
    line = "learner-0: checkpoints/learner-0.safetensors is damaged (cut): it rejoins from the syncer and a donor"
    (tmp_path / "logs" / "learner-0.log").write_text(f"old\n{line}\nmore\n")
    (tmp_path / "logs" / "learner-1.log").write_text("nothing of the kind\n")
    for _ in range(2):
        supervisor._tell_damage({"learners": [{"name": "learner-1", "state": "training"}]})
        assert [note["text"] for note in supervisor._own_notes] == [line]
        assert not supervisor._unread
