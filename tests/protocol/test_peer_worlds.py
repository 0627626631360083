"""Whole gossip runs: machines, hub and islands together. `World` checks its invariants as it goes."""

import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from farflung.chaos.plan import Fault
from farflung.core.mixing import MATCHINGS
from farflung.methods import make_method
from farflung.protocol import events as ev
from farflung.protocol.learner import LearnerMachine
from farflung.protocol.syncer import SyncerMachine
from farflung.tape import Record
from farflung.testing import World, replay

STEPS = 24  # of each


def world_of(
    num: int = 4, name: str = "gasloc", *, step_s: list[float] | None = None, steps: int = STEPS,
    faults: list[Fault] | None = None, hidden: list[str] | None = None, walls: Any = (), **options: Any,
) -> World:  # fmt: skip
    plain = {"sync_every_steps": 2, "lease_s": 1.0, "gathers": 2}
    if name == "gasloc":
        plain |= {"outer_momentum": 0.5, "mixing": 0.5}
    method = make_method(name, **{**plain, **options})
    return World(
        method, step_s or [0.1] * num, 10 * num * steps, targets=[float(i) for i in range(num)],
        faults=faults or [], hidden=hidden or [], walls=walls,
    )  # fmt: skip


def ran(num: int = 4, name: str = "gasloc", **more: Any) -> World:
    world = world_of(num, name, **more).run(until_s=200.0)
    assert world.finished == "finished", world.story()
    return world


def missed(world: World) -> dict[str, int]:
    """Sides of meetings that were not mixed, by reason, as learners told the hub."""
    reasons: dict[str, int] = {}
    for record in world.tape.of("syncer"):
        mixed = record.data["message"].get("mixed") if record.type == "MessageArrived" else None
        for meeting in mixed["meetings"] if mixed else []:
            reasons[meeting["missed"]] = reasons.get(meeting["missed"], 0) + 1
    return reasons


# ---- undisturbed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["ad_psgd", "d_adamw", "decentlam", "gasloc", "gt_dsgdm", "ld_sgd", "noloco", "qg_dsgdm"]
)
def test_every_method_keeps_its_books_and_the_mean(name: str) -> None:
    world = ran(4, name, **({"sync_every_steps": 1} if name == "ad_psgd" else {}))
    assert world.checks is not None and world.checks.means >= 8, world.story()
    assert set(missed(world)) == {""}
    assert world.hub.versions == [3]  # two on the way, and the last
    tokens = world.syncer.ledger.summary()["token_fragments"]
    assert (tokens["merged"], tokens["discarded"], tokens["in_flight"]) == (tokens["trained"], {}, 0)


@pytest.mark.parametrize("momentum_on", ["local", "mixed"])
@pytest.mark.parametrize("matching", MATCHINGS)
def test_every_matching_keeps_the_mean(matching: str, momentum_on: str) -> None:
    world = ran(4, matching=matching, momentum_on=momentum_on, steps=12)
    assert world.checks is not None and world.checks.means >= 4, world.story()


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int4"])
def test_what_a_codec_loses_does_not_move_the_mean(codec: str) -> None:
    world = ran(3, codec=codec, matching="ring", steps=12)
    assert world.checks is not None and world.checks.means >= 4


def test_with_overlap_nobody_waits_for_a_partner_on_time() -> None:
    """A round of two steps of 0.1 s; a vector takes 0.04 s with all messages."""
    world = ran(4, overlap_steps=1)
    assert set(missed(world)) == {""}
    waits = [r for r in world.tape.records if r.type == "SetTimer" and r.data["name"] == "meet"]
    assert all(r.data["at_s"] is None for r in waits), world.story()


def test_of_an_odd_number_one_idles_and_does_not_wait() -> None:
    world = ran(3)
    assert world.checks is not None
    idle = [e for e in world.checks.ended if not e.met]
    assert len(idle) > 3 and set(missed(world)) == {""}, world.story()


def test_learners_may_take_other_numbers_of_steps_a_round() -> None:
    world = ran(3, local_steps={"learner-0": 5, "learner-2": 1})
    assert world.checks is not None and world.checks.means >= 3
    steps = {m.name: m.steps_done for m in world.syncer.membership.sorted()}
    assert steps["learner-0"] > 2 * steps["learner-2"], world.story()


def test_a_slow_learner_holds_up_those_who_meet_it_and_nobody_else() -> None:
    """With a hub in lockstep all would take its pace."""
    world = ran(6, step_s=[0.05] * 5 + [0.2])
    assert world.checks is not None
    rounds = [sum(e.node == f"learner-{i}" for e in world.checks.ended) for i in range(6)]
    assert min(rounds[:5]) > rounds[5], rounds
    members = world.syncer.membership.members
    assert members["learner-0"].steps_done > 1.2 * members["learner-5"].steps_done


def test_one_learner_alone_is_a_run() -> None:
    world = ran(1)
    assert missed(world) == {}
    assert world.hub.versions == [3]


# ---- disturbed -------------------------------------------------------------------------------------------


def test_a_killed_learner_rejoins_from_a_donor_in_an_epoch_of_its_own() -> None:
    world = ran(4, faults=[Fault(kind="kill", target="learner-1", at_s=0.8)])
    proof = world.tape.notes("rejoin_proved")[-1]
    assert (proof["learner"], proof["state"]) == ("learner-1", "warm"), world.story()
    assert all(proof[f"{what}_equal"] for what in ("params", "inner", "lr", "cursor"))
    assert world.syncer.admission.rejoins == 1
    members = [note["members"] for note in world.tape.notes("epoch")]
    assert [len(names) for names in members] == [4, 3, 4]
    assert world.checks is not None
    epoch = {e.epoch for e in world.checks.ended if e.node == "learner-1.2"}
    assert epoch == {3}


def test_learners_go_on_meeting_without_the_hub() -> None:
    world = ran(4, faults=[Fault(kind="syncer_loss", target="syncer", at_s=0.5, for_s=1.2)])
    assert world.checks is not None
    lost = next(r.t for r in world.tape.records if r.type == "LinkDown")
    back = next(r.t for r in world.tape.records if "Reattached" in str(r.data))
    mixed = [
        (r.t, (r.data.get("report") or {}).get("mixed")) for r in world.tape.records if r.kind == "event"
    ]
    away = [m for t, m in mixed if m and lost + 0.3 < t < back and m["distances"]]
    assert len(away) >= 8, world.story()


def test_a_hub_that_comes_back_goes_on_counting_epochs() -> None:
    faults = [
        Fault(kind="kill", target="learner-0", at_s=0.3),
        Fault(kind="syncer_loss", target="syncer", at_s=1.2, for_s=0.3),
        Fault(kind="kill", target="learner-1", at_s=2.0),
    ]
    world = ran(4, steps=40, faults=faults)
    numbers = [note["number"] for note in world.tape.notes("epoch")]
    assert numbers == sorted(set(numbers)), world.story()
    assert world.checks is not None
    late = [e for e in world.checks.ended if e.node == "learner-1.2" and e.met]
    assert late, world.story()


def test_learners_that_nobody_can_dial_meet_through_the_hub() -> None:
    world = ran(3, hidden=["learner-1", "learner-2"])
    assert [r for r in world.tape.records if r.type == "FetchRelay"]
    assert world.checks is not None and world.checks.means >= 6, world.story()


def test_a_pair_behind_a_wall_meets_through_the_hub() -> None:
    world = ran(2, walls=[("learner-0", "learner-1")])
    assert [r for r in world.tape.records if r.type == "FetchRelay"]
    assert world.checks is not None and sum(bool(e.met) for e in world.checks.ended) >= 10, world.story()


def test_an_acknowledgement_that_is_lost_is_a_half_exchange_and_counted() -> None:
    """Learner 1 is slower: its vector comes last, learner 0 mixes, and its answer comes to nothing."""
    world = world_of(2, step_s=[0.05, 0.1])
    checks, seen = world.checks, []
    assert checks is not None

    def watch(node: str, machine: Any, event: Any, actions: Any) -> None:
        checks.saw(node, machine, event, actions)
        if node == "learner-0" and isinstance(event, ev.Arrived) and ".2." in event.object and not seen:
            seen.append(event.object)
            world.islands[1].trouble.block("both", world.now + 0.3)

    world.tape.watch = watch
    world.run(until_s=100.0)
    assert seen and len(checks.half) == 1, world.story()
    (note,) = world.tape.notes("half_exchange")
    assert note["learners"] == ["learner-0", "learner-1"] and note["drift"] > 0


def test_a_learner_whose_parameters_break_starts_over_and_hurts_nobody() -> None:
    import torch

    world = world_of(3)

    def poison() -> None:
        with torch.no_grad():
            next(iter(world.islands[1].body.inner.model.parameters())).fill_(float("nan"))  # type: ignore[union-attr]

    world.at(0.95, poison)
    world.run(until_s=100.0)
    first, *more = [note["reason"] for note in world.tape.notes("start_over")]
    assert first == "its own parameters are not finite"
    assert set(more) <= {
        "the version to install is gone"
    }  # an average that was taken meanwhile may retire it
    assert all(tensor.isfinite().all() for tensor in world.hub.model_tensors().values()), world.story()
    assert world.checks is not None
    assert not [e for e in world.checks.ended if not e.x.isfinite().all()]


def test_after_all_faults_are_over_everybody_meets_again() -> None:
    faults = [
        Fault(kind="freeze", target="learner-0", at_s=0.4, for_s=0.9),
        Fault(kind="partition", target="learner-1", at_s=0.5, for_s=0.8, direction="up"),
        Fault(kind="kill", target="learner-2", at_s=0.6),
        Fault(kind="disconnect", target="learner-3", at_s=0.7),
    ]
    world = ran(4, steps=60, faults=faults)
    assert world.checks is not None
    late = world.checks.ended[-24:]
    met = [sum(name in e.met for e in late) for name in (f"learner-{i}" for i in range(4))]
    assert min(met) >= 3, (met, world.story())


# ---- tapes -----------------------------------------------------------------------------------------------


def eventful() -> World:
    faults = [
        Fault(kind="kill", target="learner-1", at_s=0.8),
        Fault(kind="disconnect", target="learner-0", at_s=1.0),
        Fault(kind="freeze", target="learner-2", at_s=1.3, for_s=0.6),
    ]
    return ran(4, faults=faults, hidden=["learner-3"], matching="ring")


def test_every_tape_of_a_gossip_run_replays_to_the_same_actions() -> None:
    world = eventful()
    policy = world.method.policy
    for node in world.tape.nodes():
        records = [
            Record(r.t, r.node, r.seq, r.kind, json.loads(msgspec.json.encode(r.data)))
            for r in world.tape.of(node)
        ]
        name = node.partition(".")[0]
        if name == "syncer":
            header = {k: v for k, v in world.syncer.header().items() if k != "machine"}
            divergence = replay(records, SyncerMachine(policy, **header))
        else:
            address = None if name == "learner-3" else f"lab://{name}"
            divergence = replay(records, LearnerMachine(policy, learner=name, address=address))
        assert divergence is None, divergence


def test_two_gossip_runs_of_one_world_write_the_same_tape_and_bits() -> None:
    one, two = eventful(), eventful()
    assert one.tape.records == two.tape.records
    assert one.hub.model_digest() == two.hub.model_digest()


def test_the_policy_of_a_gossip_run_is_not_that_of_a_hub() -> None:
    policy = world_of().method.policy
    assert policy.digest() != replace(policy, mixing=0.25).digest()
