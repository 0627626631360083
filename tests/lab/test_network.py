"""Simulated links: latency, bandwidth, first in first out, shared uplinks."""

import pytest

from farflung.lab.links import link_specs, shared_uplinks
from farflung.lab.network import LinkSpec, Network, SharedUplink
from farflung.recipe import make_recipe

SLOW = LinkSpec(latency_s=0.5, up_bps=8000.0, down_bps=16000.0)  # 1000 bytes: 1 s up, 0.5 s down


def test_control_messages_see_latency_only():
    network = Network({"a": SLOW})
    network.bulk("a", "up", 10_000, now=0.0)
    assert network.control("a", now=2.0) == 2.5


def test_bulk_takes_its_bytes_over_the_bandwidth_and_then_the_latency():
    network = Network({"a": SLOW})
    assert network.bulk("a", "up", 1000, now=1.0) == 2.5
    assert network.bulk("a", "down", 1000, now=1.0) == 2.0


def test_a_line_is_first_in_first_out_each_way():
    network = Network({"a": SLOW})
    assert [network.bulk("a", "up", 1000, now=0.0) for _ in range(3)] == [1.5, 2.5, 3.5]
    assert network.bulk("a", "down", 1000, now=0.0) == 1.0


def test_a_line_that_fell_idle_starts_at_once():
    network = Network({"a": SLOW})
    network.bulk("a", "up", 1000, now=0.0)
    assert network.bulk("a", "up", 1000, now=10.0) == 11.5


def test_links_of_different_learners_do_not_meet():
    network = Network({"a": SLOW, "b": SLOW})
    assert network.bulk("a", "up", 1000, now=0.0) == network.bulk("b", "up", 1000, now=0.0) == 1.5


def test_a_shared_uplink_is_used_in_turns_and_bounds_the_bandwidth():
    network = Network({"a": SLOW, "b": SLOW, "c": SLOW}, [SharedUplink(learners=["a", "b"], bps=4000.0)])
    assert network.bulk("a", "up", 1000, now=0.0) == 2.5
    assert network.bulk("b", "up", 1000, now=0.0) == 4.5  # after a's
    assert network.bulk("c", "up", 1000, now=0.0) == 1.5
    assert network.bulk("b", "down", 1000, now=0.0) == 1.0


def test_a_broken_connection_frees_its_own_lines():
    network = Network({"a": SLOW})
    network.bulk("a", "up", 10_000, now=0.0)
    network.reset("a")
    assert network.bulk("a", "up", 1000, now=0.0) == 1.5


def test_infinite_bandwidth_costs_no_time():
    assert Network({"a": LinkSpec(latency_s=0.1)}).bulk("a", "up", 10**12, now=1.0) == 1.1


@pytest.mark.parametrize("wrong", [{"latency_s": -1.0}, {"up_bps": 0.0}, {"down_bps": -1.0}])
def test_a_link_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="must"):
        LinkSpec(**wrong)


def test_a_recipe_gives_one_number_for_all_or_one_each():
    lab = {
        "latency_s": 0.1,
        "up_mbps": [1.0, 2.0],
        "shared_uplinks": [{"learners": ["learner-0"], "mbps": 3.0}],
    }
    recipe = make_recipe({"num_learners": 2, "lab": lab})
    specs = link_specs(recipe)
    assert [(s.latency_s, s.up_bps, s.down_bps) for s in specs.values()] == [
        (0.1, 1e6, float("inf")),
        (0.1, 2e6, float("inf")),
    ]
    assert shared_uplinks(recipe) == [SharedUplink(learners=["learner-0"], bps=3e6)]
