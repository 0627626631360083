"""The verdict: what fits, what limits, in which order, and how sure it is."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from farflung.errors import UserError
from farflung.plan.candidate import Candidate, Choices, candidates
from farflung.plan.judging import EFFORT, Judged, Wish, judge, reference
from farflung.plan.setting import Setting

QUICK = replace(EFFORT, max_seeds=4, round_steps=150)
GIVEN: dict[str, Any] = {
    "params": 1e8, "islands": 4, "chips": 100, "tokens_per_step": 1000.0, "budget_tokens": 1e7,
}  # fmt: skip


def judged(
    method: str, setting: dict[str, Any], wish: dict[str, Any] | None = None, **choices: Any
) -> list[Judged]:
    made = Setting(**{**GIVEN, **setting})
    listed = candidates(made, Choices(methods=(method,), **({"learners": (4,)} | choices)))
    return judge(made, listed, Wish(effort=QUICK, **(wish or {"simulated": 4})))


def test_without_trouble_only_compute_limits() -> None:
    (one, *_) = judged("decoupled", {}, steps=(24,), codecs=("fp32",))
    assert one.limit == "compute" and one.fits and one.simulated
    assert one.time_s.mean == pytest.approx(1e7 / (4 * 1000))
    assert one.goodput.mean == 1.0 and one.breadth == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize(
    ("setting", "limit"),
    [
        ({"up_mbps": 50.0}, "uplink"),
        ({"down_mbps": 50.0}, "downlink"),
        ({"up_mbps": 1000.0, "down_mbps": 1000.0, "hub_mbps": 200.0}, "hub link"),
        ({"mtbi_s": 100 * 200.0, "stands_s": 15.0}, "failures"),
        ({"slowest": 0.5}, "slowest island"),
    ],
)
def test_what_limits_is_named(setting: dict[str, Any], limit: str) -> None:
    (one,) = judged("diloco", setting, steps=(100,), codecs=("fp32",))
    assert one.limit == limit and one.goodput.mean < 0.97


def test_what_does_not_fit_is_marked_and_comes_last() -> None:
    found = judged(
        "decoupled", {"up_mbps": 40.0, "down_mbps": 400.0}, {"simulated": 50}, quorums=(4,), steps=(24,)
    )
    by_codec = {one.candidate.policy.codec: one for one in found}
    assert not by_codec["fp32"].fits and by_codec["fp32"].limit == "uplink"
    assert by_codec["fp32"].why.startswith("does not fit: ")
    assert by_codec["int4"].fits
    fits = [one.fits for one in found]
    assert fits == sorted(fits, reverse=True)


def test_the_smallest_overlap_that_hides_the_exchange_is_taken() -> None:
    (fast,) = judged("decoupled", {}, quorums=(4,), steps=(24,), codecs=("fp32",))
    links = {"up_mbps": 100.0, "down_mbps": 200.0, "step_s": 0.5}
    (slow,) = judged("decoupled", links, quorums=(4,), steps=(100,), codecs=("fp32",))
    assert fast.candidate.policy.overlap_steps == 1
    assert slow.candidate.policy.overlap_steps == 5  # 1.33 s and 0.67 s


def test_too_much_measured_loss_comes_after_what_is_not_measured_and_that_after_what_is() -> None:
    made = Setting(**GIVEN)
    listed = [
        *candidates(made, Choices(methods=("diloco",), learners=(4,), steps=(10, 100, 300), codecs=("fp32",)))
    ]
    order = [
        one.candidate.policy.sync_every_steps for one in judge(made, listed, Wish(max_loss=1.0, simulated=0))
    ]
    assert order == [10, 300, 100]
    (last,) = [one for one in judge(made, listed, Wish(max_loss=1.0, simulated=0)) if one.limit == "quality"]
    assert last.candidate.policy.sync_every_steps == 100


def test_failures_cost_time_with_an_interval() -> None:
    (one, *_) = judged("decoupled", {"mtbi_s": 100 * 200.0}, steps=(24,), codecs=("fp32",), quorums=(1,))
    assert 0.7 < one.goodput.mean < 0.95
    assert 0 < one.time_s.half_width < 0.2 * one.time_s.mean
    assert one.time_s.mean == pytest.approx(1e7 / 4000 / one.goodput.mean)


def test_closed_forms_and_the_simulator_tell_the_same_time() -> None:
    """Of some cycles: the simulator's watch ends within one."""
    setting = {"up_mbps": 200.0, "down_mbps": 400.0, "latency_s": 0.05}
    options = {"steps": (10, 30), "codecs": ("fp32", "int4")}
    made = Setting(**{**GIVEN, **setting})
    listed = [*candidates(made, Choices(methods=("diloco",), learners=(4,), **options))]
    exact = judge(made, listed, Wish(simulated=99, effort=replace(QUICK, round_steps=1500)))
    rough = judge(made, listed, Wish(simulated=0, effort=QUICK))
    times = {(o.candidate.policy.sync_every_steps, o.candidate.policy.codec): o.time_s.mean for o in exact}
    for one in rough:
        key = (one.candidate.policy.sync_every_steps, one.candidate.policy.codec)
        assert one.time_s.mean == pytest.approx(times[key], rel=0.03)
        assert math.isinf(one.time_s.half_width) and not one.simulated


def test_json_holds_no_infinity() -> None:
    found = judged("gasloc", {}, {"simulated": 1}, steps=(24, 100), codecs=("bf16",))
    text = json.dumps([one.as_dict() for one in found], allow_nan=False)
    assert '"quorum": null' in text and '"time_s_ci": null' in text


def test_the_reference_moves_far_more() -> None:
    made = Setting(**{**GIVEN, "up_mbps": 100.0, "down_mbps": 100.0})
    beaten = reference(made, QUICK)
    (one, *_) = judged("decoupled", {"up_mbps": 100.0, "down_mbps": 100.0}, steps=(100,), codecs=("int4",))
    assert beaten["time_s"] > 10 * one.time_s.mean and beaten["bytes_up"] > 100 * one.bytes_up


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"methods": ("dilico",)}, "did you mean 'diloco'"),
        ({"methods": ("noloco",)}, "cannot be planned"),
        ({"learners": (3,)}, "multiple of the 4 islands"),
        ({"learners": (4,), "quorums": (5,)}, "at most the 4 learners"),
        ({"codecs": ("int5",), "methods": ("diloco",)}, "int5"),
        ({"steps": (4,), "fragments": (8,), "methods": ("streaming",)}, "at most H"),
    ],
)
def test_choices_that_cannot_be_are_told(choices: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        list(candidates(Setting(**GIVEN), Choices(**choices)))


def test_a_candidate_is_listed_once() -> None:
    listed = [*candidates(Setting(**GIVEN), Choices())]
    keys = {(c.learners, repr(c.policy)) for c in listed}
    assert len(keys) == len(listed) > 50
    assert {c.method for c in listed} == {"decoupled", "streaming", "diloco", "sparseloco", "gasloc"}
    assert isinstance(listed[0], Candidate)
