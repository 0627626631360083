"""The example that newcomers copy: an own model in an own loop, two processes, one served run."""

import re
import runpy
import sys
from pathlib import Path
from statistics import median

import pytest
import safetensors.torch

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from processes_helpers import Served, finish

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_loop.py"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The served run, and (exit code, output, errors) of both learners and of the syncer."""
    folder = tmp_path_factory.mktemp("served")
    with Served(folder, "--set", "budget_tokens=400_000", "--set", "task=no:such") as served:
        call = [str(EXAMPLE), "--connect", served.url, "--name"]
        learners = [served.learner(*call, name) for name in ("ada", "bob")]
        yield served, [finish(learner) for learner in learners], finish(served.process)


def test_everyone_leaves_in_order(ended):
    _, learners, syncer = ended
    for code, out, err in learners:
        assert (code, err) == (0, "") and ": finished, loss" in out
    assert syncer[0] == 0 and "finished: run/model.safetensors" in syncer[1] and "Traceback" not in syncer[2]


def test_both_learners_took_part(ended):
    served, _, _ = ended
    assert {name for note in served.notes("merged") for name in note["learners"]} == {"ada", "bob"}


def test_the_loss_goes_down(ended):
    _, learners, _ = ended
    losses = [[float(loss) for loss in re.findall(r"loss (\d+\.\d+)", out)] for _, out, _ in learners]
    assert max(each[0] for each in losses) > 0.5  # whoever came first began with chance
    # of several batches: a single one may fall on the step after an adoption
    assert max(median(each[-5:]) for each in losses) < 0.15, losses


def test_the_model_file_fits_the_users_own_model(ended):
    served, _, _ = ended
    model = runpy.run_path(str(EXAMPLE))["Net"]()
    model.load_state_dict(safetensors.torch.load_file(served.run_dir / "model.safetensors"))
    assert model.layers[2].num_batches_tracked > 0


def test_the_folder_holds_a_report(ended):
    served, _, _ = ended
    assert (served.run_dir / "summary.json").exists() and (served.run_dir / "report.html").exists()
