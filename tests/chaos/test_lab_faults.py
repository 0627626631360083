"""Every kind of fault in a small world: it bites, nothing breaks, and the books are exact at the end."""

from itertools import pairwise

import pytest
from chaos_helpers import Ordeal, undergo

from farflung.chaos.plan import Fault
from farflung.methods import decoupled, diloco

METHODS = {
    "free": decoupled(num_fragments=2, sync_every_steps=4, lease_s=1.0),
    "rebase": decoupled(num_fragments=2, sync_every_steps=4, lease_s=1.0, quorum=2, adoption="rebase"),
    "lockstep": diloco(sync_every_steps=4, lease_s=1.0),
}
FREE = METHODS["free"]
ONE = "learner-1"
PLANS = {
    "kill": {},
    "freeze": {"for_s": 3.0},
    "slow": {"for_s": 3.0},
    "disconnect": {},
    "partition": {"for_s": 3.0},
    "partition-up": {"for_s": 3.0, "direction": "up"},
    "partition-down": {"for_s": 3.0, "direction": "down"},
    "partition-long": {"for_s": 50.0},
    "delay": {"for_s": 3.0, "latency_s": 0.3},
    "throttle": {"for_s": 3.0, "mbps": 0.001},
    "duplicate": {"count": 3},
    "corrupt": {"count": 2},
    "corrupt-frame": {"what": "frame"},
    "clock_jump": {"jump_s": 60.0},
    "clock_jump-syncer": {"jump_s": 60.0, "target": "syncer"},
    "disk_full": {"for_s": 3.0},
    "syncer_loss": {"for_s": 2.0, "target": "syncer"},
}


def fault(name: str, **changes: object) -> Fault:
    plain = {"kind": name.partition("-")[0], "target": ONE, "at_s": 2.0}
    one = Fault(**{**plain, **PLANS[name], **changes})
    one.check(name, ["learner-0", ONE, "learner-2"])
    return one


def calm_end(ordeal: Ordeal) -> Ordeal:
    world = ordeal.world
    assert world.finished == "finished", ordeal.story
    assert ordeal.verdict.ok, ordeal.story
    assert ordeal.verdict.ended == "finished"
    world.syncer.ledger.validate()
    assert world.syncer.ledger.in_flight == 0
    assert not [note for note in ordeal.notes("alarm") if note["what"] != "narrow_merges"], ordeal.story
    return ordeal


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", PLANS)
def test_whatever_fault_befalls_a_run_it_ends_with_exact_books(name, method):
    ordeal = calm_end(undergo(METHODS[method], fault(name)))
    assert [h["fault"] for h in ordeal.happened] == [name.partition("-")[0]]


def test_a_lost_link_is_dialled_again_and_nothing_is_lost():
    ordeal = calm_end(undergo(FREE, fault("disconnect")))
    assert [n["role"] for n in ordeal.notes("joined") if n["learner"] == ONE] == ["birth", "reattach"]


@pytest.mark.parametrize(("name", "lapses"), [("partition-up", 1), ("partition-down", 0), ("partition", 1)])
def test_only_a_partition_of_the_uplink_silences_a_learner(name, lapses):
    ordeal = calm_end(undergo(FREE, fault(name)))
    assert len(ordeal.notes("lease_lapsed")) == len(ordeal.notes("lease_renewed")) == lapses, ordeal.story
    assert not ordeal.notes("disconnected")
    heard = ordeal.times("Received", ONE)
    silence_s = max(b - a for a, b in pairwise(heard))
    assert (silence_s >= 3.0) == (name != "partition-up")


def test_a_partition_that_outlasts_the_link_costs_it():
    ordeal = calm_end(undergo(FREE, fault("partition-long"), budget_tokens=16_000))
    assert len(ordeal.notes("disconnected")) == 1, ordeal.story
    assert [n["role"] for n in ordeal.notes("joined") if n["learner"] == ONE] == ["birth", "reattach"]


def slowest_upload_s(*plan: Fault) -> float:
    """Of learner-1, from the machine's wish to its end."""
    began: dict[str, float] = {}
    slowest = 0.0
    for record in undergo(METHODS["lockstep"], *plan).world.tape.of(ONE):
        if record.type == "Upload":
            began[record.data["object"]] = record.t
        elif record.type == "Uploaded":
            slowest = max(slowest, record.t - began[record.data["object"]])
    return slowest


def test_delay_and_a_thin_line_make_bulk_late():
    """The model is one fragment of 48 fp32 numbers, 192 bytes: 1.5 s at 1 kbit/s."""
    assert slowest_upload_s() == pytest.approx(0.02)
    assert slowest_upload_s(fault("delay")) == pytest.approx(0.32)
    assert slowest_upload_s(fault("throttle")) == pytest.approx(1.536)


def test_a_repeated_contribution_is_refused_by_name_and_merged_once():
    ordeal = calm_end(undergo(FREE, fault("duplicate")))
    assert [n["reason"] for n in ordeal.notes("refused")] == ["repeat"] * 3, ordeal.story


def test_a_damaged_chunk_is_sent_again():
    ordeal = calm_end(undergo(FREE, fault("corrupt")))
    assert ordeal.world.island(ONE).trouble.caught == 4  # two each way
    assert not ordeal.notes("refused")


def test_a_damaged_frame_costs_the_connection_and_nothing_else():
    ordeal = calm_end(undergo(FREE, fault("corrupt-frame")))
    assert [n["reason"] for n in ordeal.notes("refused")] == ["frame"]
    assert [n["role"] for n in ordeal.notes("joined") if n["learner"] == ONE] == ["birth", "reattach"]


@pytest.mark.parametrize("name", ["clock_jump", "clock_jump-syncer"])
def test_a_clock_that_leaps_expires_nobody(name):
    ordeal = calm_end(undergo(FREE, fault(name)))
    late = [r for r in ordeal.world.tape.records if r.type == "TimerFired" and r.data["late_s"] > 50]
    assert late, ordeal.story
    assert not ordeal.notes("lease_lapsed") and not ordeal.notes("lost")


def test_a_syncer_that_is_lost_goes_on_from_its_state_and_everybody_reattaches():
    ordeal = calm_end(undergo(FREE, fault("syncer_loss")))
    world = ordeal.world
    first, second = world.tape.of("syncer"), world.tape.of("syncer.2")
    assert second[0].t - first[-1].t >= 2.0
    roles = [n["role"] for n in ordeal.notes("joined")]
    assert roles == ["birth"] * 3 + ["reattach"] * 3
    joins = [r.data["message"] for r in second if r.type == "MessageArrived"][:3]
    assert all(join["type"] == "Join" and max(join["held"]) > 0 for join in joins)
    steps = [r.t for r in world.tape.of(ONE) if r.data.get("report", {}).get("tokens")]
    assert max(b - a for a, b in pairwise(steps)) < 0.5  # trained all the while


def test_a_merged_contribution_whose_answer_was_lost_with_the_syncer_is_not_taken_again():
    """At every moment of a second: whatever the syncer had just done, it does not do it twice."""
    for moment in range(20):
        calm_end(undergo(METHODS["rebase"], fault("syncer_loss", at_s=2.0 + moment / 20), budget_tokens=900))


def test_faults_come_together():
    storm = [fault(name, at_progress=0.1 + i / 25, at_s=None) for i, name in enumerate(PLANS)]
    for method in METHODS.values():
        ordeal = calm_end(undergo(method, *storm, budget_tokens=6000))
        assert len(ordeal.happened) == len(PLANS)
