"""Fault plans: what each kind takes, what is refused and how, and that every entry is plain data."""

import msgspec
import pytest

from farflung.chaos.plan import FIELDS, Fault, check_for_run
from farflung.errors import UserError
from farflung.recipe import make_recipe

LEARNERS = ["learner-0", "learner-1"]
LASTS = {"for_s": 1.0}
NEEDED = {
    "freeze": LASTS,
    "slow": LASTS,
    "partition": LASTS,
    "delay": LASTS | {"latency_s": 0.1},
    "throttle": LASTS | {"mbps": 1.0},
    "clock_jump": {"jump_s": 5.0},
    "disk_full": LASTS,
    "syncer_loss": LASTS | {"target": "syncer"},
}


def fault(kind: str, **changes: object) -> Fault:
    plain = {"kind": kind, "target": "learner-1", "at_s": 1.0}
    return Fault(**{**plain, **NEEDED.get(kind, {}), **changes})


@pytest.mark.parametrize("kind", FIELDS)
def test_every_kind_can_be_planned_and_survives_json(kind):
    one = fault(kind)
    one.check("here", LEARNERS)
    assert msgspec.json.decode(msgspec.json.encode(one), type=Fault) == one
    assert one.details()["fault"] == kind


@pytest.mark.parametrize(
    ("kind", "field"),
    [(kind, field) for kind, fields in NEEDED.items() for field in fields if field != "target"],
)
def test_a_field_that_a_kind_needs_is_asked_for(kind, field):
    for value in (None, 0.0, -1.0, float("inf")):
        with pytest.raises(UserError, match=f"here: {kind} needs {field} above 0"):
            fault(kind, **{field: value}).check("here", LEARNERS)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("kill", {"for_s": 2.0}, "for_s has no effect on kill; restart_s of the recipe sets the pause"),
        ("kill", {"mbps": 2.0}, "mbps has no effect on kill"),
        ("freeze", {"factor": 3.0}, "factor has no effect on freeze"),
        ("disconnect", {"for_s": 2.0}, "for_s has no effect on disconnect"),
        ("partition", {"what": "sidecar"}, "what has no effect on partition"),
        ("throttle", {"direction": "up"}, "direction has no effect on throttle"),
        ("delay", {"count": 2}, "count has no effect on delay"),
        ("syncer_loss", {"jump_s": 2.0}, "jump_s has no effect on syncer_loss"),
        ("duplicate", {"count": 0}, "count = 0: must be at least 1"),
        ("slow", {"factor": 1.0}, "factor = 1.0: must be above 1"),
        ("kill", {"what": "chunk"}, "what = 'chunk': kill knows island, trainer, sidecar"),
        ("corrupt", {"what": "trainer"}, "what = 'trainer': corrupt knows chunk, frame"),
        ("kill", {"target": "syncer"}, "target = 'syncer': kill befalls a learner"),
        ("syncer_loss", {"target": "learner-0"}, "target = 'learner-0': a syncer_loss befalls 'syncer'"),
        ("kill", {"target": "learner-7"}, "target = 'learner-7' is no learner"),
        ("kill", {"at_s": None}, "give one of at_progress and at_s"),
        ("kill", {"at_s": float("inf")}, "at_s = inf: must not be negative"),
    ],
)
def test_what_cannot_be_is_told_with_field_and_value(kind, changes, message):
    with pytest.raises(UserError) as error:
        fault(kind, **changes).check("here", LEARNERS)
    assert str(error.value).startswith(f"here: {message}")


@pytest.mark.parametrize("kind", ["clock_jump", "disk_full", "syncer_loss"])
def test_what_real_processes_cannot_be_given_is_refused_and_points_to_the_lab(kind):
    with pytest.raises(UserError, match=f"fault 2: {kind} cannot be done to a real run.*farflung lab"):
        check_for_run([fault("kill"), fault(kind)])


def test_a_recipe_draws_faults_beside_those_it_names():
    table = {"generator": "poisson", "per_learner": 2.0, "kinds": ["disconnect"]}
    raw = {"faults": [msgspec.to_builtins(fault("kill"))], "generate": [table]}
    plan = make_recipe(raw).plan()
    assert plan[0] == fault("kill") and len(plan) > 1
    assert {f.kind for f in plan[1:]} == {"disconnect"}
    assert plan == make_recipe(raw).plan()
    assert plan != make_recipe(raw | {"seed": 1}).plan()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"generator": "poison"}, "generate 1: generator = 'poison' (did you mean 'poisson'?)"),
        ({}, "generate 1: generator = None (known: "),
        ({"generator": "poisson", "region": 3}, "generate 1: unknown key 'region'"),
        ({"generator": "poisson", "kinds": ["syncer_loss"]}, "invalid enum value 'syncer_loss'"),
        (
            {"generator": "poisson", "per_learner": -1.0},
            "generate 1: per_learner = -1.0: must be in 0..1e+06",
        ),
        (
            {"generator": "stragglers", "factor": [1.0, 2.0]},
            "factor = [1.0, 2.0]: two numbers above 1",
        ),
        (
            {"generator": "partitions", "for_s": [3.0, 2.0]},
            "for_s = [3.0, 2.0]: two numbers above 0",
        ),
        ({"generator": "partitions", "progress": [0.5, 1.5]}, "generate 1: progress = [0.5, 1.5]: must grow"),
        ({"generator": "partitions", "seconds": [5, 5]}, "generate 1: seconds = [5.0, 5.0]: must grow"),
    ],
)
def test_a_generator_that_cannot_be_is_told(table, message):
    with pytest.raises(UserError) as error:
        make_recipe({"generate": [table]})
    assert message in str(error.value)
