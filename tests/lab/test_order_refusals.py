"""`farflung lab --order`: what it cannot repeat is one line and exit code 2, never a traceback or a verdict."""

import json
import shutil
import sys

import pytest
from lab_helpers import reference, run, small

from farflung import cli, tape

QUIET = {"faults": [], "num_learners": 2, "steps": 8, "evals": 0}


def order(monkeypatch, capsys, *args):
    """Exit code, what it printed, and its line of error."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["farflung", "lab", "--order", *map(str, args)])
    code = 0
    try:
        cli.main()
    except SystemExit as exit:
        code = exit.code or 0
    out, err = capsys.readouterr()
    return code, out, err


def refused(monkeypatch, capsys, *args):
    code, out, err = order(monkeypatch, capsys, *args)
    assert (code, out, err.count("\n")) == (2, "", 1), (code, out, err)
    return err


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("order") / "run"
    run(small(**QUIET), run_dir)
    return run_dir


@pytest.fixture
def copy(done, tmp_path):
    return shutil.copytree(done, tmp_path / "run")


def change(run_dir, edit):
    """Edit the lines of the syncer's tape."""
    path = run_dir / tape.TAPE_DIR / "syncer.jsonl"
    path.write_text("".join(edit(path.read_text().splitlines(keepends=True))))


def test_a_whole_run_comes_out_bit_for_bit(copy, monkeypatch, capsys):
    code, out, err = order(monkeypatch, capsys, copy)
    assert (code, out.startswith("bit-identical"), err) == (0, True, "")


@pytest.mark.parametrize("method", ["noloco", "data_parallel"])
def test_an_order_is_repeated_for_hub_methods_only(tmp_path, monkeypatch, capsys, method):
    policy = {"sync_every_steps": 4} if method == "noloco" else {}
    make = small if method == "noloco" else reference
    run(make(**QUIET, method=method, policy=policy), tmp_path / "run")
    err = refused(monkeypatch, capsys, tmp_path / "run")
    assert f"method = '{method}': an order is repeated for hub methods only" in err


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: lines[: len(lines) // 2], "the tape breaks off after seq"),
        (lambda lines: [*lines[:-1], lines[-1][:30]], "the tape breaks off after seq"),
        (lambda lines: [*lines[:20], *lines[40:]], "after seq 19 comes 40: lines are missing"),
        (lambda lines: [*lines[:5], "{not json\n", *lines[6:]], "line 6 is damaged"),
        (lambda lines: lines[1:], "no header in the first line"),
        (lambda lines: [], "no header in the first line"),
        (lambda lines: [lines[0].replace('"schema": 1', '"schema": 2'), *lines[1:]], "tape schema 2, this"),
        (
            lambda lines: [line.replace('"reason":"finished"', '"reason":"suspended"') for line in lines],
            "the run was suspended: --order needs a run that finished in one go",
        ),
    ],
)
def test_a_damaged_or_unfinished_run_is_told(copy, monkeypatch, capsys, edit, message):
    change(copy, edit)
    assert message in refused(monkeypatch, capsys, copy)


def test_without_the_digest_of_the_run_there_is_no_verdict(copy, monkeypatch, capsys):
    (copy / tape.SUMMARY).unlink()
    assert f"no digest in {tape.SUMMARY} to compare with" in refused(monkeypatch, capsys, copy)


@pytest.mark.parametrize("changes", [{"scale": "tiny"}, {"scale": "tiny", "task": "vision"}])
def test_learners_with_a_model_of_their_own_cannot_be_repeated(copy, monkeypatch, capsys, changes):
    path = copy / tape.CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    err = refused(monkeypatch, capsys, copy)
    assert "its learners brought a model of their own: only runs of a recipe's task can be repeated" in err


def test_more_fragments_than_the_tasks_model_has_are_a_model_of_their_own(copy, monkeypatch, capsys):
    path = copy / tape.CONFIG
    config = json.loads(path.read_text())
    config["policy"] |= {"num_fragments": 500, "sync_every_steps": 500}
    path.write_text(json.dumps(config))
    assert "its learners brought a model of their own" in refused(monkeypatch, capsys, copy)


@pytest.mark.parametrize("args", [["--out", "x"], ["--set", "seed=1"], ["recipe.toml"]])
def test_what_has_no_effect_beside_an_order_is_refused(done, monkeypatch, capsys, args):
    assert "give no recipe, --set or --out with it" in refused(monkeypatch, capsys, done, *args)
