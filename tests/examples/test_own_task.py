"""The task that newcomers copy: it trains in the lab, and says what it does not know."""

import json
import sys
from pathlib import Path

import pytest

from farflung import cli

FOLDER = Path(__file__).parents[2] / "examples"
OPTIONS = {"task": "own_task:spirals", "num_learners": 2, "steps": 300, "evals": 1, "lab.workers": 0}


def lab(monkeypatch, out, **options):
    words = [f"--set={name}={value}" for name, value in {**OPTIONS, **options}.items()]
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(sys, "argv", ["farflung", "lab", "--json", "--out", str(out), *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_it_learns_to_tell_the_spirals_apart(tmp_path, monkeypatch, capsys):
    assert not lab(monkeypatch, tmp_path / "run", scale="wide")
    summary = json.loads(capsys.readouterr().out)
    assert summary["eval_loss_final"] < 0.2 < summary["eval_loss_start"]
    assert summary["eval_accuracy_final"] > 0.95 and summary["ledger_exact"]


def test_a_scale_that_it_does_not_know_is_one_line(tmp_path, monkeypatch, capsys):
    assert lab(monkeypatch, tmp_path / "run", scale="tiny") == 2
    assert capsys.readouterr().err == "farflung: scale = 'tiny': this task knows narrow, wide\n"
