"""BatchNorm in the lab: running statistics are averaged, counters take the maximum, and the model can be used."""

import json
import sys
from collections import defaultdict

import pytest
import safetensors.torch
import torch
from idx_files import NAMES, write_images

from farflung import cli, tape
from farflung.config import write_config
from farflung.lab.lab import Lab
from farflung.lab.start import lab_config
from farflung.recipe import make_recipe
from farflung.report.closing import close_run
from farflung.train.vision_models import VISION_SCALES, build_classifier

STEPS = 16
METHODS = {
    "decoupled": {"num_fragments": 1, "overlap_steps": 0},
    "sparseloco": {"codec": "top1024-2bit-12bit", "outer_lr": 1.0},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return write_images(tmp_path_factory.mktemp("data") / "images")


def recipe(path, method, policy, **more):
    return {
        "task": "vision", "scale": "resnet", "method": method, "policy": {"sync_every_steps": 4, **policy},
        "num_learners": 3, "steps": STEPS, "batch_size": 8, "warmup_steps": 2, "evals": 1, "eval_batches": 1,
        "data": {"path": path}, "lab": {"workers": 0, "jitter": 0.1}, **more,
    }  # fmt: skip


def buffers(tensors):
    """Statistics and counters, by name."""
    return {
        name: t.clone()
        for name, t in tensors.items()
        if "running" in name or name.endswith("num_batches_tracked")
    }


class Watched(Lab):
    """Keeps each learner's buffers at the moments when it has just installed a version."""

    def go(self):
        self.installed = defaultdict(dict)
        return super().go()

    def _review(self):
        for island in (i for i in self.run.islands if i.body is not None):
            trainer = island.body.trainer
            version = trainer.island.versions[0]
            if version > 0 and trainer.island.counters(0) == (0, 0):
                held = buffers(trainer.inner.model.state_dict())
                self.installed[version].setdefault(island.name, held)
        super()._review()


def run(lab, folder):
    write_config(lab.config, folder)
    return close_run(folder, lab.go())


@pytest.mark.parametrize("method", METHODS)
def test_learners_hold_equal_statistics_after_each_merge_and_the_loss_falls(method, path, tmp_path):
    lab = Watched(lab_config(make_recipe(recipe(path, method, METHODS[method]))), tmp_path)
    summary = run(lab, tmp_path)
    assert (summary["outcome"], summary["ledger_exact"]) == ("finished", True)
    assert summary["tokens_trained"] >= STEPS * 3 * 8  # images
    assert summary["eval_loss_final"] < summary["eval_loss_start"] - 0.5
    shared = {version: held for version, held in lab.installed.items() if len(held) > 1}
    assert len(shared) >= 2
    for held in shared.values():
        first, *others = held.values()
        assert first["norm.running_mean"].abs().max() > 0
        assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_counters_take_the_maximum_and_statistics_the_mean_of_gossiping_learners(path, tmp_path):
    lab = Lab(lab_config(make_recipe(recipe(path, "gasloc", {}))), tmp_path)
    summary = run(lab, tmp_path)
    assert summary["eval_accuracy_final"] > summary["eval_accuracy_start"] + 0.2
    average = buffers(lab.run.hub.model_tensors())
    shown = [buffers(tensors) for tensors in lab.run.hub.shown().values()]
    assert len(shown) == 3
    for name, value in average.items():
        of_each = torch.stack([held[name] for held in shown])
        if name.endswith("num_batches_tracked"):
            assert value == of_each.max() >= STEPS
        else:
            torch.testing.assert_close(value, of_each.mean(0))


def test_the_model_loads_strictly_in_plain_pytorch_with_the_counters_of_its_busiest_learner(path, tmp_path):
    lab = Lab(lab_config(make_recipe(recipe(path, "diloco", {}))), tmp_path)
    summary = run(lab, tmp_path)
    model = build_classifier(VISION_SCALES["resnet"])
    tensors = safetensors.torch.load_file(tmp_path / tape.MODEL)
    model.load_state_dict(tensors, strict=True)
    safetensors.torch.load_model(model, tmp_path / tape.MODEL, strict=True)
    assert tensors["norm.num_batches_tracked"] == STEPS == max(summary["steps_of"].values())
    assert lab.task.evaluate(model) == summary["eval_loss_final"]
    evals = [json.loads(line) for line in (tmp_path / tape.METRICS).read_text().splitlines()]
    accuracies = [e["figures"]["accuracy"] for e in evals if e["kind"] == "eval"]
    assert accuracies[0] == summary["eval_accuracy_start"]
    assert accuracies[-1] == summary["eval_accuracy_final"] == lab.task.measure(model)["accuracy"]
    assert "accuracy" in (tmp_path / tape.REPORT).read_text()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-5]), "cut off: its header promises"),
        (lambda file: file.write_bytes(b"<html>"), "not an IDX file: it begins with 3c 68 74 6d"),
        (lambda file: file.unlink(), "there is no train-images-idx3-ubyte or train-images-idx3-ubyte.gz"),
    ],
)
def test_a_bad_file_is_one_line_and_exit_code_2(damage, message, tmp_path, monkeypatch, capsys):
    folder = write_images(tmp_path / "images")
    damage(tmp_path / "images" / NAMES["images"])
    settings = ["task=vision", "scale=micro", f"data.path={folder}"]
    out = str(tmp_path / "run")
    monkeypatch.setattr(
        sys, "argv", ["farflung", "run", "--out", out, *(word for s in settings for word in ("--set", s))]
    )
    with pytest.raises(SystemExit) as exit:
        cli.main()
    err = capsys.readouterr().err
    assert exit.value.code == 2
    assert err.startswith("farflung: ") and err.count("\n") == 1
    assert message in err
    assert folder in err
    assert not (tmp_path / "run").exists()
