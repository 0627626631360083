"""The reference: what it computes is plain training, and its time is a formula."""

import json

import pytest
import torch
from lab_helpers import reference, run
from torch import nn

from farflung import tape
from farflung.config import resolve
from farflung.errors import UserError
from farflung.lab.data_parallel import DataParallel, all_reduce_s
from farflung.lab.network import LinkSpec
from farflung.recipe import make_recipe
from farflung.report.page import render
from farflung.testing.tapes import replay_run
from farflung.train.loop import InnerLoop


def done(config):
    driver = DataParallel(config, None)
    results = driver.go()
    return driver, results


def plain(config, num_steps, batches_of=None):
    """Train alone, with the schedule of the run."""
    task = config.task()
    model = task.build_model()
    loop = InnerLoop(task, model, task.build_optimizer(model), task.build_batches(0, 1), rng_seed=0)
    if batches_of is not None:
        loop.batches = batches_of(task)
    tokens = 0
    for _ in range(num_steps):
        tokens += loop.step(tokens / config.budget_tokens).num_tokens
    return model


class Together:
    """The batches of all learners as one."""

    cursor = 0

    def __init__(self, task, num_learners):
        self._parts = [task.build_batches(i, num_learners) for i in range(num_learners)]

    def __next__(self):
        return torch.cat([next(part) for part in self._parts])


def test_one_learner_is_plain_training_bit_for_bit():
    config = reference(num_learners=1, steps=5)
    driver, _ = done(config)
    for ours, theirs in zip(driver.model.parameters(), plain(config, 5).parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_n_learners_are_plain_training_on_the_concatenated_batch():
    config = reference(num_learners=3, steps=5)
    driver, _ = done(config)
    model = plain(config, 5, lambda task: Together(task, 3))
    for ours, theirs in zip(driver.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_an_all_reduce_is_a_ring():
    links = [LinkSpec(latency_s=0.1, up_bps=8e6), LinkSpec(latency_s=0.2, down_bps=4e6), LinkSpec()]
    assert all_reduce_s(3_000_000, links) == pytest.approx(2 * 2 / 3 * 6 + 2 * 2 * 0.2)
    assert all_reduce_s(3_000_000, links[:1]) == 0.0


def test_a_step_lasts_as_long_as_the_slowest_learner_and_the_all_reduce():
    lab = {"step_s": [1.0, 3.0], "latency_s": 0.25, "up_mbps": 8.0}
    driver, results = done(reference(num_learners=2, steps=4, lab=lab))
    num_bytes = 4 * sum(p.numel() for p in driver.model.parameters())
    assert results["wall_s"] == pytest.approx(4 * (3.0 + 2 * 0.25 + num_bytes / 1e6))
    assert results["bytes_up"] == results["bytes_down"] == 4 * 2 * num_bytes


def test_gradients_take_as_long_as_those_of_the_model_that_is_pretended():
    lab = {"step_s": 1.0, "latency_s": 0.0, "up_mbps": 8.0, "model_bytes": 5e6}
    _, results = done(reference(num_learners=2, steps=4, lab=lab))
    assert results["wall_s"] == pytest.approx(4 * (1.0 + 5.0))


def two(policy, *faults, steps=10):
    lab = {"step_s": 1.0, "latency_s": 0.0, "startup_s": 5.0}
    config = reference(
        num_learners=2, steps=steps, lab=lab, restart_s=2.0, policy=policy, faults=list(faults)
    )
    return done(config)


KILL = {"kind": "kill", "target": "learner-1", "at_s": 2.5}  # in the fourth step
FREEZE = {"kind": "freeze", "target": "learner-0", "at_s": 2.0, "for_s": 4.0}


def test_a_dead_learner_stops_everybody_and_its_step_is_lost():
    driver, results = two({}, KILL)
    assert results["wall_s"] == pytest.approx(3.5 + 7.0 + 7.0)  # 3 steps and a half, the pause, 7 steps
    assert (results["kills"], results["rejoins"], driver.tokens) == (1, 1, driver.config.budget_tokens)


def test_an_elastic_group_goes_on_and_takes_it_in_again():
    driver, results = two({"elastic": True, "reconfigure_s": 1.0}, KILL, steps=20)
    # 3.5 s, 1 s to leave it, 6 steps alone until 10.5 s, 1 s to take it in; 6 + 6 of 40 batches are done
    assert results["wall_s"] == pytest.approx(3.5 + 1 + 6 + 1 + 14)
    assert results["rejoins"] == 1 and driver.tokens == driver.config.budget_tokens


def test_a_freeze_is_waited_for_unless_it_is_worth_going_on():
    assert two({}, FREEZE)[1]["wall_s"] == pytest.approx(10 + 4)
    assert two({"elastic": True, "reconfigure_s": 5.0}, FREEZE)[1]["wall_s"] == pytest.approx(10 + 4)
    assert two({"elastic": True, "reconfigure_s": 0.5}, FREEZE)[1]["wall_s"] < 14


def test_who_is_back_before_a_reconfiguration_has_ended_is_taken_in_by_it():
    faults = [FREEZE, FREEZE | {"target": "learner-1", "for_s": 6.0}]
    lab = {"step_s": 1.0, "latency_s": 0.0}
    policy = {"elastic": True, "reconfigure_s": 3.0}
    _, results = done(reference(num_learners=3, steps=10, lab=lab, policy=policy, faults=faults))
    # 3 s, 3 s to leave both, 1 step alone, 3 s in which both are taken in; 20 of 30 batches are left
    assert results["wall_s"] == pytest.approx(3 + 3 + 1 + 3 + 7)


def test_a_slow_learner_slows_everybody():
    slow = {"kind": "slow", "target": "learner-1", "at_s": 0.0, "for_s": 6.0, "factor": 3.0}
    assert two({}, slow)[1]["wall_s"] == pytest.approx(1 + 2 * 3 + 7)


def test_its_folder_is_reported_like_any_other_and_has_nothing_to_replay(tmp_path):
    summary = run(
        reference(faults=[{"kind": "kill", "target": "learner-1", "at_progress": 0.5}]), tmp_path / "r"
    )
    assert summary["ledger_exact"] and summary["merged_share"] == 1.0
    assert (summary["kills"], summary["rejoins"], summary["outcome"]) == (1, 1, "finished")
    assert 0 < summary["goodput"] < 1 and 0 < summary["uptime"] < 1
    assert json.loads((tmp_path / "r" / tape.SUMMARY).read_text()) == summary
    assert "data_parallel" in render([tmp_path / "r", tmp_path / "r"])
    with pytest.raises(UserError, match="data_parallel has no machine to replay"):
        replay_run(tmp_path / "r")


def test_run_and_serve_refuse_it_and_point_to_torchrun():
    with pytest.raises(UserError, match=r"'data_parallel' is the lab's reference.*torchrun"):
        resolve(make_recipe({"method": "data_parallel"}), "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": {"elastc": True}}, "has no option 'elastc' .did you mean 'elastic'"),
        ({"policy": {"elastic": 3}}, "policy: elastic: expected bool"),
        ({"policy": {"reconfigure_s": -1.0}}, "reconfigure_s = -1.0"),
        ({"faults": [{"kind": "disconnect", "target": "learner-1", "at_s": 1}]}, "knows kill, freeze, slow"),
    ],
)
def test_what_it_does_not_know_is_one_line(changes, message):
    with pytest.raises(UserError, match=message):
        reference(**changes)


def test_gradients_are_the_mean_over_learners():
    from farflung.lab.data_parallel import average_gradients_

    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 6.0])
    average_gradients_([parameter], 3)
    assert parameter.grad.tolist() == [1.0, 2.0]
