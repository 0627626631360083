"""Through the command line: a table, JSON, files; and what cannot be is one clear line with exit code 2."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from farflung import cli

LITTLE = ["plan", "--params", "1e8", "--islands", "2", "--chips", "4", "--simulated", "1", "--max-seeds", "2"]
NARROWED = [*LITTLE, "--method", "diloco", "--sync-every", "30", "--codec", "int4", "--up-mbps", "100"]


def main(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """Exit code of the whole program."""
    monkeypatch.setattr(sys, "argv", ["farflung", *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(monkeypatch, *options) == 0
    return capsys.readouterr().out


def test_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(monkeypatch, capsys, *NARROWED)
    assert "diloco" in out and "uplink: learners wait" in out and "data-parallel" in out
    assert "docs/results/compression.md" in out


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(monkeypatch, capsys, *NARROWED, "--json"))
    assert found["setting"]["down_mbps"] is None and found["data_parallel"]["time_s"] > 0
    first = found["candidates"][0]
    assert first["simulated"] and first["time_s_ci"][0] <= first["time_s"] <= first["time_s_ci"][1]
    assert {part["study"] for part in first["loss_measured"]} == {"compression", "gossip_local_steps"}


def test_a_file_and_options_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("params = 1e9\nislands = 3\nstep_s = 2.0\nup_mbps = 50\n")
    options = ("--scale", "micro", "--tokens-per-s", "100", "--tokens-per-step", "50", "--simulated", "0")
    found = json.loads(run(monkeypatch, capsys, "plan", str(path), *options, "--json"))["setting"]
    assert found["islands"] == 3 and found["step_s"] == 0.5 and found["up_mbps"] == 50
    assert 30_000 < found["params"] < 50_000


def test_a_recipe_describes_the_setting_and_is_a_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(
        'method = "decoupled"\nscale = "micro"\nnum_learners = 3\nsteps = 50\nbatch_size = 4\n'
        "[policy]\nnum_fragments = 5\nsync_every_steps = 7\n[lab]\nstep_s = [1.0, 1.0, 2.0]\nup_mbps = 8.0\n"
    )
    found = json.loads(run(monkeypatch, capsys, "plan", str(path), "--simulated", "1", "--json"))
    assert found["setting"]["budget_tokens"] == 3 * 50 * 4 * 64 and found["setting"]["slowest"] == 1.0
    (given,) = (one for one in found["candidates"] if one["given"])
    assert given["num_fragments"] == 5 and given["simulated"]


MISTAKES: list[tuple[list[str], str]] = [
    (["plan"], "params: give the model's parameters"),
    (["plan", "--params", "-1"], "params = -1"),
    (["plan", "--params", "nan"], "params = nan"),
    (["plan", "--params", "1e9", "--scale", "tiny"], "give one of them"),
    (["plan", "--scale", "tinny"], "did you mean 'tiny'"),
    (["plan", "--params", "1e9", "--up-mbps", "0"], "up_mbps = 0"),
    (["plan", "--params", "1e9", "--hub-mbps", "-3"], "hub_mbps = -3"),
    (["plan", "--params", "1e9", "--mtbi-days", "-1"], "mtbi_s = -86400"),
    (["plan", "--params", "1e9", "--tokens-per-s", "0"], "tokens_per_s = 0"),
    (["plan", "--params", "1e9", "--tokens-per-s", "5", "--step-s", "1"], "give one of them"),
    (["plan", "--params", "1e9", "--islands", "4", "--quorum", "5"], "quorum (K) = 5: must be at most the 4"),
    (["plan", "--params", "1e9", "--islands", "0"], "islands = 0"),
    (["plan", "--params", "1e9", "--learners", "9"], "multiple of the 8 islands"),
    (["plan", "--params", "1e9", "--learners", "16"], "one a chip"),
    (["plan", "--params", "1e9", "--budget-tokens", "0"], "budget_tokens = 0"),
    (["plan", "--params", "1e9", "--method", "dilico"], "did you mean 'diloco'"),
    (["plan", "--params", "1e9", "--codec", "int5"], "int5"),
    (["plan", "--params", "1e9", "--downlink-codec", "foo"], "downlink_codec = 'foo' is unknown"),
    (["plan", "--params", "1e9", "--codec", "zzz"], "dct-top32-int8-12bit"),
    (["plan", "--params", "1e9", "--sync-every", "0"], "H = 0"),
    (["plan", "--params", "1e9", "--overlap", "-1"], "tau = -1"),
    (["plan", "--params", "1e9", "--max-seeds", "1"], "max_seeds = 1"),
    (["plan", "nowhere.toml"], "nowhere.toml: No such file"),
    (["plan", "--check", "nowhere"], "nowhere: not a run folder"),
    (["plan", "--check", "nowhere", "--params", "1e9"], "give nothing else with it"),
    (["simulate", "--preset", "tabel1"], "did you mean 'table1'"),
    (["simulate", "--mtbi-days", "-1"], "mtbi_s"),
    (["simulate", "--quorum", "9"], "at most the 8 learners"),
    (["simulate", "--up-mbps", "0"], "up_mbps = 0"),
    (["simulate", "--learners", "0"], "learners = 0"),
    (["simulate", "--chips", "-5"], "chips = -5"),
    (["simulate", "--step-s", "-1"], "step_s = -1"),
    (["simulate", "--method", "decoupld"], "did you mean 'decoupled'"),
    (["simulate", "--burst", "host=8/-2"], "mtbi_s = -172800"),
]


@pytest.mark.parametrize(
    ("options", "says"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    options: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, *options) == 2
    told = capsys.readouterr()
    assert told.out == "" and says in told.err
    assert told.err.startswith("farflung: ") and told.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("parms = 1e9", "did you mean 'params'"),
        ('params = "many"', "must be a number"),
        ("params = 1e9\nislands = 2.5", "must be int"),
        ("params = ", "not TOML"),
        ("params = true", "must be a number"),
    ],
)
def test_a_file_with_a_mistake_is_told_by_name(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    assert main(monkeypatch, "plan", str(path)) == 2
    told: Any = capsys.readouterr().err
    assert says in told and str(path) in told and told.count("\n") == 1
