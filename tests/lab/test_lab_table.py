"""The recipe's [lab] table: every key is checked before anything starts."""

import math
import sys

import pytest

from farflung import cli
from farflung.errors import UserError
from farflung.recipe import Lab, SharedUplink, make_recipe

BOTH = ["learner-0", "learner-1"]
LISTS = ("step_s", "latency_s", "up_mbps", "down_mbps")
ABOVE_0 = ("step_s", "up_mbps", "down_mbps", "model_bytes")
AT_LEAST_0 = ("latency_s", "jitter", "merge_s", "startup_s", "workers")


def said(**lab: object) -> str:
    with pytest.raises(UserError) as error:
        make_recipe({"num_learners": 2, "lab": lab})
    return str(error.value)


def test_every_key_is_tried_here():
    assert {*ABOVE_0, *AT_LEAST_0, "shared_uplinks"} == set(Lab.__struct_fields__)
    assert SharedUplink.__struct_fields__ == ("learners", "mbps")


@pytest.mark.parametrize("field", ABOVE_0)
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_what_must_be_above_0(field, value):
    assert said(**{field: value}) == f"recipe: lab.{field} = {value}: must be finite and above 0"


@pytest.mark.parametrize("field", [field for field in AT_LEAST_0 if field != "workers"])
@pytest.mark.parametrize("value", [-5.0, math.nan, math.inf])
def test_what_must_be_at_least_0(field, value):
    assert said(**{field: value}) == f"recipe: lab.{field} = {value}: must be finite and at least 0"


def test_how_many_processes_and_how_much_jitter():
    assert said(workers=-1) == "recipe: lab.workers = -1: must be finite and at least 0"
    assert said(jitter=5.0) == "recipe: lab.jitter = 5.0: must be in 0..1"


@pytest.mark.parametrize("field", LISTS)
@pytest.mark.parametrize("value", [[], [0.1], [1.0, 2.0, 3.0]])
def test_a_list_has_one_entry_a_learner(field, value):
    wanted = "must be one number, or a list of 2: one a learner (num_learners)"
    assert said(**{field: value}) == f"recipe: lab.{field} = {value}: {wanted}"


@pytest.mark.parametrize("field", LISTS)
def test_each_entry_of_a_list_is_checked(field):
    assert said(**{field: [1.0, math.nan]}).startswith(
        f"recipe: lab.{field} = [1.0, nan]: must be finite and"
    )
    assert getattr(make_recipe({"num_learners": 2, "lab": {field: [1.0, 2.0]}}).lab, field) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("uplink", "message"),
    [
        ({"mbps": 0.0}, "mbps = 0.0: must be finite and above 0"),
        ({"mbps": -1.0}, "mbps = -1.0: must be finite and above 0"),
        ({"mbps": math.nan}, "mbps = nan: must be finite and above 0"),
        ({"mbps": math.inf}, "mbps = inf: must be finite and above 0"),
        ({"learners": ["learner-7"]}, "learners = ['learner-7']: 'learner-7' is no learner"),
        ({"learners": []}, "learners = []: must be learners of this run, each once"),
        (
            {"learners": BOTH[:1] * 2},
            "learners = ['learner-0', 'learner-0']: must be learners of this run, each",
        ),
    ],
)
def test_a_shared_uplink_that_cannot_be(uplink, message):
    good = {"learners": BOTH, "mbps": 1.0}
    assert said(shared_uplinks=[good, good | uplink]).startswith(f"recipe: lab.shared_uplinks[1].{message}")


def test_a_key_of_a_shared_uplink_that_does_not_exist():
    message = said(shared_uplinks=[{"learners": BOTH, "mbsp": 1.0}])
    assert message == "recipe: lab.shared_uplinks[0]: unknown key 'mbsp' (did you mean 'mbps'?)"


@pytest.mark.parametrize(
    "setting", ["lab.step_s=0", "lab.latency_s=nan", "lab.up_mbps=[1, 2, 3]", "lab.merge_s=-5"]
)
def test_it_is_one_line_and_exit_code_2_before_there_is_a_folder(tmp_path, monkeypatch, capsys, setting):
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(
        sys, "argv", ["farflung", "lab", "--set", "num_learners=2", "--set", setting, "--out", str(out)]
    )
    with pytest.raises(SystemExit) as exit:
        cli.main()
    err = capsys.readouterr().err
    assert (exit.value.code, err.count("\n"), out.exists()) == (2, 1, False), err
    assert setting.partition("=")[0] in err
