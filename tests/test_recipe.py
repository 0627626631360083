"""Recipes: defaults, settings, fault plans, and what a resolved configuration keeps."""

from typing import get_args

import msgspec
import pytest

from farflung.chaos.plan import Fault, Kind
from farflung.config import read_config, resolve, write_config
from farflung.errors import UserError
from farflung.recipe import Recipe, load_recipe, make_recipe

MICRO = {"scale": "micro", "num_learners": 2, "steps": 3}
PLAN = '[[faults]]\nkind = "kill"\ntarget = "learner-0"\nat_progress = 0.5\n'
KILL = Fault(kind="kill", target="learner-0", at_progress=0.5)


def test_without_a_recipe_every_default_applies():
    assert load_recipe(None, []) == Recipe()


def test_a_recipe_in_the_repository_is_in_order(request):
    for path in sorted((request.config.rootpath / "recipes").glob("*.toml")):
        resolve(load_recipe(path, []), "run")


def test_settings_change_one_key_each_and_the_last_one_wins(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('seed = 1\nscale = "micro"\n[policy]\nquorum = 2\ncodec = "int8"\n')
    recipe = load_recipe(path, ["seed=2", "seed = 3", "policy.quorum=1", "data.path=plays", "pace_s=0.5"])
    assert (recipe.seed, recipe.pace_s, recipe.data.path) == (3, 0.5, "plays")
    assert recipe.policy == {"quorum": 1, "codec": "int8"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("tiny", "tiny"), ("'tiny'", "tiny"), ('"a=b"', "a=b"), ("a=b", "a=b"), ("a\nx = 2", "a\nx = 2")],
)
def test_the_value_of_a_setting_is_toml_or_else_text(text, value):
    assert load_recipe(None, [f"scale={text}"]).scale == value


def test_a_fault_plan_may_lie_in_a_file_beside_the_recipe_or_be_set(tmp_path, monkeypatch):
    (tmp_path / "plan.toml").write_text(PLAN)
    (tmp_path / "recipe.toml").write_text('faults = "plan.toml"\n')
    assert load_recipe(tmp_path / "recipe.toml", []).faults == [KILL]
    monkeypatch.chdir(tmp_path)
    assert load_recipe(None, ["faults=plan.toml"]).faults == [KILL]


def test_a_fault_plan_without_faults_is_told(tmp_path):
    (tmp_path / "plan.toml").write_text("seed = 1\n")
    with pytest.raises(UserError, match=r"plan.toml: a fault plan holds \[\[faults\]\]"):
        load_recipe(None, [f"faults={tmp_path / 'plan.toml'}"])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({}, "give one of at_progress and at_s"),
        ({"at_s": 1, "at_progress": 0.5}, "give one of at_progress and at_s"),
        ({"at_progress": 1.5}, "at_progress = 1.5: must be in 0..1"),
        ({"at_s": -1}, "at_s = -1.0: must not be negative"),
        ({"at_s": 1, "kind": "freeze"}, "freeze needs for_s above 0"),
        ({"at_s": 1, "for_s": 2}, "for_s has no effect on kill"),
        ({"at_s": 1, "kind": "slow", "for_s": 2, "factor": 1}, "factor = 1.0: must be above 1"),
        ({"at_s": 1, "target": "learner-9"}, "target = 'learner-9' is no learner"),
    ],
)
def test_a_fault_that_cannot_be_is_told_with_its_number(fault, message):
    with pytest.raises(UserError, match=f"recipe: fault 1: {message}"):
        make_recipe({"faults": [{"kind": "kill", "target": "learner-0", **fault}]})


@pytest.mark.parametrize(
    ("table", "kind", "known"),
    [
        ("faults", {"kind": "kil", "target": "learner-0", "at_s": 1}, get_args(Kind)),
        ("generate", {"generator": "region_loss", "kind": "kil"}, ("freeze", "kill", "partition")),
    ],
)
def test_a_bad_kind_is_told_with_what_there_is_each_once(table, kind, known):
    with pytest.raises(UserError) as error:
        make_recipe({table: [kind]})
    assert str(error.value).endswith(f"invalid enum value 'kil' (known: {', '.join(sorted(known))})")


def test_steps_become_tokens_of_the_whole_run():
    assert resolve(make_recipe(MICRO), "run").budget_tokens == 3 * 2 * 16 * 64


def test_a_resolved_configuration_is_read_back_as_it_was(tmp_path):
    recipe = make_recipe(MICRO | {"policy": {"quorum": 2}, "faults": [msgspec.to_builtins(KILL)]})
    config = resolve(recipe, "run")
    write_config(config, tmp_path)
    read = read_config(tmp_path)
    resolved = msgspec.structs.replace(recipe, policy={}, budget_tokens=config.budget_tokens)
    assert read == msgspec.structs.replace(config, recipe=resolved)
    assert read.policy.quorum == 2


@pytest.mark.parametrize("text", ["[]", "{}", "nothing", '{"policy": 3}', '{"policy": {"method": "diloco"}}'])
def test_a_config_file_that_is_not_ours_is_told(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="not a run's configuration"):
        read_config(tmp_path)


def test_more_fragments_than_the_model_fills_are_found_before_anything_starts():
    policy = {"fragment_plan": "by_layer", "num_fragments": 20}
    with pytest.raises(UserError, match="num_fragments = 20: 'by_layer' can fill 1 to 15 for this model"):
        resolve(make_recipe(MICRO | {"policy": policy}), "run")


def test_a_syncer_with_a_token_budget_needs_no_task():
    recipe = make_recipe({"task": "somebody_elses:model", "budget_tokens": 1000})
    assert resolve(recipe, "run", trains=False).budget_tokens == 1000
    with pytest.raises(UserError, match="somebody_elses"):
        resolve(recipe, "run")
