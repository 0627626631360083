"""The verb: JSON and tables out, bad input told in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from farflung.errors import UserError
from farflung.simulate.verbs import simulate

APP = typer.Typer()
APP.command()(simulate)
LITTLE = ["--chips", "300000", "--learners", "2", "--half-width", "0.1", "--max-seeds", "2"]


def run(*options: str) -> Any:
    result = CliRunner().invoke(APP, options)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_a_scenario_as_json() -> None:
    found = json.loads(run(*LITTLE, "--json"))
    assert 0.8 < found["goodput"] < 0.95
    assert found["goodput_ci"][0] < found["goodput"] < found["goodput_ci"][1]
    assert found["lost"].keys() >= {"reconfiguring"}


def test_a_scenario_as_a_table() -> None:
    assert "goodput" in run(*LITTLE, "--burst", "host=8/730", "--outage", "region=4/30/2")


def test_a_preset_as_json_and_as_a_picture(tmp_path: Path) -> None:
    out = run("--preset", "table4", "--json", "--picture", str(tmp_path / "table4.svg"))
    cells = json.loads(out)["cells"]
    assert {"method", "learners", "extra", "time", "published"} <= cells[0].keys()
    assert (tmp_path / "table4.svg").stat().st_size > 1000


def test_a_trace_is_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    found = json.loads(run(*LITTLE, "--trace", str(path), "--time-scale", "0.1", "--json"))
    assert path.read_text().count("[[faults]]") == found["faults"] > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--chips", "-5"], "chips = -5"),
        (["--mtbi-days", "-1"], "mtbi"),
        (["--quorum", "9"], "at most the 8 learners"),
        (["--up-mbps", "0"], "up_mbps = 0"),
        (["--preset", "tabel1"], "did you mean 'table1'"),
        (["--method", "dilico"], "did you mean 'diloco'"),
        (["--burst", "host=8"], "NAME=CHIPS/DAYS"),
        (["--outage", "region=0/1/1"], "domains"),
        (["--sync-every", "4"], "at most H"),
        (["--codec", "int5"], "codec"),
        (["--learners", "0"], "learners = 0"),
        (["--picture", "x.svg"], "give --preset"),
        (["--method", "data_parallel", "--quorum", "1"], "no effect"),
        (["--half-width", "0"], "half_width = 0.*above 0 and below 1"),
        (["--away-s", "0"], "mean_s"),
        (["--preset", "table1", "--learners", "8", "--step-s", "1"], "--learners, --step-s: no effect"),
    ],
)
def test_bad_input_is_one_line(options: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says) as told:
        run(*options)
    assert "\n" not in str(told.value)
