"""Tasks by name, the built-in text task, and what a task of one's own may get wrong."""

import math

import pytest
import torch
from torch import nn

from farflung.errors import UserError
from farflung.train.task import DataConfig, Task, TaskConfig, load_task


@pytest.fixture
def config(tmp_path) -> TaskConfig:
    path = tmp_path / "own.txt"
    path.write_bytes(b"To be, or not to be, that is the question. " * 100)
    return TaskConfig(scale="micro", batch_size=4, eval_batches=1, data=DataConfig(path=str(path)))


def test_the_text_task_trains_on_an_own_file(config):
    task = load_task("text", config)
    model = task.build_model()
    batch = next(task.build_batches(0, 1))
    assert batch.shape == (4, 65)
    assert task.num_tokens(batch) == 4 * 64
    assert task.loss(model, batch).item() == pytest.approx(math.log(256), rel=0.02)


def test_the_default_config_is_shakespeare_and_tiny():
    task = load_task("text", TaskConfig())
    assert sum(p.numel() for p in task.build_model().parameters()) == 119_104
    assert next(task.build_batches(3, 4)).shape == (16, 65)


def test_learners_draw_from_shards_of_their_own(tmp_path):
    path = tmp_path / "halves.txt"
    path.write_bytes(b"a" * 4500 + b"b" * 5500)  # the last tenth is held out
    config = TaskConfig(scale="micro", data=DataConfig(path=str(path)))
    task = load_task("text", config)
    assert next(task.build_batches(0, 2)).unique().tolist() == [ord("a")]
    assert next(task.build_batches(1, 2)).unique().tolist() == [ord("b")]


def test_evaluation_is_deterministic_and_leaves_each_modules_mode_unchanged(config):
    task = load_task("text", config)
    model = task.build_model()
    model.train()
    model.blocks[1].eval()
    modes = [m.training for m in model.modules()]
    assert task.evaluate(model) == task.evaluate(model)
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())


def test_the_mode_is_put_back_when_evaluation_fails(config):
    task = load_task("text", config)
    broken = nn.Sequential(nn.Linear(1, 1))
    with pytest.raises(RuntimeError):
        task.evaluate(broken)
    assert broken.training


def test_weight_decay_is_for_matrices_only(config):
    task = load_task("text", config)
    optimizer = task.build_optimizer(task.build_model())
    decays = {(p.dim() >= 2, g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert decays == {(True, 0.1), (False, 0.0)}


def test_the_learning_rate_warms_up_over_own_steps_and_ends_at_a_tenth(config):
    task = load_task("text", config)
    assert task.lr_multiplier(0, 0.0) < 0.1
    assert task.lr_multiplier(1000, 0.0) == pytest.approx(1.0)
    assert task.lr_multiplier(1000, 1.0) == pytest.approx(0.1)


def test_a_task_of_ones_own_is_found_by_its_path(tmp_path, monkeypatch, config):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_task_module.py").write_text(
        "import dataclasses\n"
        "from farflung.train.task import load_task\n"
        "def build(config):\n"
        "    return dataclasses.replace(load_task('text', config), name='own')\n"
        "def wrong(config):\n"
        "    return 3\n"
    )
    task = load_task("own_task_module:build", config)
    assert isinstance(task, Task)
    assert task.name == "own"
    with pytest.raises(UserError, match="the function returned int"):
        load_task("own_task_module:wrong", config)
    with pytest.raises(UserError, match=r"no function 'biuld' \(did you mean 'build'\?\)"):
        load_task("own_task_module:biuld", config)


def test_a_module_that_does_not_import_is_named_with_the_reason(tmp_path, monkeypatch, config):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_task_module.py").write_text("1 / 0\n")
    with pytest.raises(UserError, match=r"importing 'no_such_module' failed .*PYTHONPATH"):
        load_task("no_such_module:build", config)
    with pytest.raises(UserError, match="ZeroDivisionError: division by zero"):
        load_task("broken_task_module:build", config)
    with pytest.raises(UserError, match="importing '' failed"):
        load_task(":build", config)


def test_an_unknown_task_name_gets_a_hint(config):
    with pytest.raises(UserError, match=r"task = 'txt': unknown \(did you mean 'text'\?\)"):
        load_task("txt", config)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"seed": -1}, "seed = -1"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"batch_size": 1.5}, "batch_size = 1.5"),
        ({"lr": 0.0}, "lr = 0.0"),
        ({"lr": float("nan")}, "lr = nan"),
        ({"warmup_steps": -1}, "warmup_steps = -1"),
        ({"eval_batches": 0}, "eval_batches = 0"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(bad, message):
    with pytest.raises(UserError, match=message):
        TaskConfig(**bad)


def test_same_config_gives_the_same_model_and_batches(config):
    one, two = load_task("text", config), load_task("text", config)
    assert all(
        torch.equal(a, b)
        for a, b in zip(one.build_model().parameters(), two.build_model().parameters(), strict=True)
    )
    assert torch.equal(next(one.build_batches(1, 2)), next(two.build_batches(1, 2)))
