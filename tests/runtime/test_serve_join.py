"""`farflung serve` and `farflung join` as real processes: who fits trains, who does not is told why."""

import contextlib
import io
import json
import signal
import sys
import time
import urllib.error
import urllib.request

import pytest
import safetensors.torch
from processes_helpers import DEADLOCK_S, Served, finish, start

from farflung import cli
from farflung.testing.tapes import replay_run
from farflung.train.gpt import GPT, SCALES

RECIPE = """
scale = "micro"
num_learners = 2
budget_tokens = 1_000_000_000
pace_s = 0.01

[policy]
num_fragments = 3
sync_every_steps = 6
lease_s = 5.0
"""
OTHERS = {
    "wrong token": ("no-such-token", []),
    "other method": (None, ["--set", "method=diloco"]),
    "other policy": (None, ["--set", "policy.outer_lr=0.5"]),
    "other model": (None, ["--set", "scale=tiny"]),
}


def ask(served, path, method="GET", **headers):
    headers = {"Authorization": f"Bearer {served.token}", **headers}
    request = urllib.request.Request(f"{served.url}{path}", headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=DEADLOCK_S) as response:
        return json.loads(response.read())


def until(served, happened):
    """Wait for something in the status; returns it."""
    deadline_s = time.monotonic() + DEADLOCK_S
    while not happened(status := ask(served, "/status")):
        assert time.monotonic() < deadline_s, status
        time.sleep(0.02)
    return status


def join_here(served, token, more):
    """`farflung join` in this process, which has torch already; returns exit code and errors."""
    words = ["farflung", *served.line.split()[1:], "--name", "eve", *more]
    errors = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(errors):
        patch.chdir(served.folder)
        patch.setattr(sys, "argv", words)
        patch.setattr(sys, "path", list(sys.path))
        patch.setenv("FARFLUNG_TOKEN", token or served.token)
        with pytest.raises(SystemExit) as exit:
            cli.main()
    return exit.value.code, errors.getvalue()


class Story:
    """Two learners join and train; strangers try to; then the run is told to finish."""

    def __init__(self, served):
        self.served = served
        learners = [served.join(name) for name in ("ada", "bob")]
        until(served, lambda s: s["live"] == 2 and s["num_merges"] > 3)
        self.strangers = {who: join_here(served, token, more) for who, (token, more) in OTHERS.items()}
        with pytest.raises(urllib.error.HTTPError) as self.foreign:
            ask(served, "/status", **{"X-Farflung-Run": "another"})
        self.foreign.value.close()
        merges = ask(served, "/status")["num_merges"]
        self.status = until(served, lambda s: s["num_merges"] > merges + 3)
        ask(served, "/stop?mode=finish", "POST")
        self.learners = [finish(learner) for learner in learners]
        self.syncer = finish(served.process)


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    (folder / "r.toml").write_text(RECIPE)
    with Served(folder, "r.toml", "--set", "seed=1") as served:
        yield Story(served)


def test_the_printed_line_is_all_that_a_learner_needs(story):
    assert "join r.toml --set seed=1 --connect http://127.0.0.1:" in story.served.line
    assert story.learners == [(0, "finished\n", "")] * 2


def test_the_syncer_leaves_in_order_with_model_and_report(story):
    code, out, err = story.syncer
    assert code == 0 and "gave the run its first parameters" in err and "Traceback" not in err
    assert out == "finished: run/model.safetensors\nreport: run/report.html\n"
    summary = json.loads((story.served.run_dir / "summary.json").read_bytes())
    assert summary["outcome"] == "finished" and summary["ledger_exact"] and summary["digest"]


def test_both_learners_were_merged(story):
    assert {name for note in story.served.notes("merged") for name in note["learners"]} == {"ada", "bob"}


def test_the_model_loads_strictly_with_plain_pytorch(story):
    model = GPT(SCALES["micro"])
    tensors = safetensors.torch.load_file(story.served.run_dir / "model.safetensors")
    model.load_state_dict(tensors)
    assert all(value.isfinite().all() for value in tensors.values())


@pytest.mark.parametrize(
    ("who", "line"),
    [
        ("wrong token", "refused (token): the join token is missing or wrong"),
        ("other method", "refused: your method is diloco:"),
        ("other policy", "refused: your method is decoupled:"),
        ("other model", "refused: your model (names, shapes, dtypes, fragment plan) differs from this run's"),
    ],
)
def test_who_does_not_fit_is_told_in_one_line(story, who, line):
    code, err = story.strangers[who]
    assert code == 2 and err.startswith(f"farflung: {line}") and err.count("\n") == 1


def test_a_foreign_run_is_refused(story):
    assert story.foreign.value.code == 403 and story.foreign.value.headers["X-Farflung-Reason"] == "run"


def test_who_was_refused_is_counted_and_others_train_on(story):
    assert story.status["refused"] == {"token": 1, "method": 2, "fingerprint": 1, "run": 1}
    assert [(m["name"], m["state"]) for m in story.status["learners"]] == [
        ("ada", "training"),
        ("bob", "training"),
    ]


def test_a_served_run_that_was_stopped_in_order_goes_on(tmp_path):
    (tmp_path / "r.toml").write_text(RECIPE)
    with Served(tmp_path, "r.toml") as served:
        learner = served.join("ada")
        until(served, lambda s: s["num_merges"] > 3)
        served.process.send_signal(signal.SIGINT)
        code, out, _ = finish(served.process)
        assert code == 0 and out.endswith("go on with: farflung serve --resume run\n")
        assert finish(learner)[:2] == (0, "suspended\n")
    before = json.loads((served.run_dir / "summary.json").read_bytes())
    code, _, err = finish(start(tmp_path, "-m", "farflung.cli", "run", "--resume", "run"))
    assert code == 2 and "go on with `farflung serve --resume run`" in err
    with Served(tmp_path, "--resume", "run") as served:
        assert "join r.toml --connect" in served.line
        learner = served.join("ada")
        until(served, lambda s: s["num_merges"] > before["merges"] + 3)
        ask(served, "/stop?mode=finish", "POST")
        assert finish(served.process)[0] == 0 and finish(learner)[:2] == (0, "finished\n")
    after = json.loads((served.run_dir / "summary.json").read_bytes())
    assert before["outcome"] == "suspended" and after["outcome"] == "finished"
    assert after["tokens_trained"] > before["tokens_trained"] and after["ledger_exact"]
    assert all(verdict.same for verdict in replay_run(served.run_dir))


def test_where_the_recipes_task_is_trained_another_model_does_not_get_in_first(tmp_path):
    recipe = RECIPE.replace("budget_tokens = 1_000_000_000", "steps = 100_000")
    (tmp_path / "r.toml").write_text(recipe)
    with Served(tmp_path, "r.toml") as served:
        code, err = join_here(served, None, ["--set", "scale=tiny"])
        assert code == 2 and "is not that of the recipe" in err and "that `serve` printed" in err
        served.join("ada")
        until(served, lambda s: s["live"] == 1)


def test_the_token_is_for_its_owner_only(story):
    path = story.served.run_dir / "token"
    assert path.read_text().strip() == story.served.token and path.stat().st_mode & 0o077 == 0


def test_a_report_as_json_is_one_object_and_nothing_else(story, capsys, monkeypatch):
    run_dir = str(story.served.run_dir)
    for folders in ([run_dir], [run_dir, run_dir]):
        monkeypatch.setattr(sys, "argv", ["farflung", "report", "--json", *folders])
        cli.app(standalone_mode=False)
        out, err = capsys.readouterr()
        assert isinstance(json.loads(out), dict) and err == ""


def test_a_report_that_cannot_be_written_is_one_line(story, capsys, monkeypatch, tmp_path):
    out = tmp_path / "missing" / "report.html"
    monkeypatch.setattr(sys, "argv", ["farflung", "report", str(story.served.run_dir), "--out", str(out)])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err == f"farflung: {out}: cannot be written: No such file or directory\n"
