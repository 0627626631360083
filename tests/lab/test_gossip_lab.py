"""Gossip in the lab, with real training: the same recipe, the same tape and bits; and learners that come back."""

import json

import pytest
from lab_helpers import SMALL, run, small

from farflung import tape
from farflung.chaos.oracle import judge
from farflung.testing.tapes import replay_run

POLICY = {"sync_every_steps": 4, "lease_s": 2.0, "gathers": 2, "matching": "ring"}


def gossip(**changes):
    """Four learners, one of them killed; steps of 0.1 s, links of 40 Mbit/s."""
    plain = {"method": "gasloc", "policy": POLICY, "num_learners": 4, "steps": 20}
    return small(**{**plain, **changes})


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("gossip") / "once"
    return run_dir, run(gossip(), run_dir)


def test_the_same_recipe_gives_the_same_tape_and_the_same_bits(once, tmp_path):
    first_dir, first = once
    again = run(gossip(), tmp_path / "again")
    assert (tmp_path / "again" / tape.TAPE).read_bytes() == (first_dir / tape.TAPE).read_bytes()
    assert again["digest"] == first["digest"]


def test_workers_change_nothing(once, tmp_path):
    first_dir, first = once
    shared = run(gossip(lab={**SMALL["lab"], "workers": 2}), tmp_path / "shared")
    assert (tmp_path / "shared" / tape.TAPE).read_bytes() == (first_dir / tape.TAPE).read_bytes()
    assert shared["digest"] == first["digest"]


def test_every_tape_replays_to_the_same_actions(once):
    verdicts = replay_run(once[0])
    assert len(verdicts) == 6  # the hub, four learners, one of them twice
    assert all(v.same for v in verdicts), "\n".join(map(str, verdicts))


def notes(run_dir, kind):
    """The data of every note of this kind on the hub's tape."""
    lines = (run_dir / tape.TAPE_DIR / "syncer.jsonl").read_text().splitlines()
    records = [json.loads(line)["data"] for line in lines]
    return [r["data"] for r in records if r.get("type") == "Note" and r["kind"] == kind]


def test_a_killed_learner_comes_back_from_a_donor_with_equal_digests(once):
    run_dir, summary = once
    assert (summary["kills"], summary["rejoins"], summary["ledger_exact"]) == (1, 1, True)
    proof = notes(run_dir, "rejoin_proved")[-1]
    assert (proof["learner"], proof["state"], proof["role"]) == ("learner-1", "warm", "rejoin")
    assert proof["donor"] in {"learner-0", "learner-2", "learner-3"}
    assert all(proof[f"{what}_equal"] for what in ("params", "inner", "lr", "cursor")), proof
    assert [len(note["members"]) for note in notes(run_dir, "epoch")] == [4, 3, 4]


def test_the_average_is_taken_on_the_way_and_at_the_end(once):
    versions = [note["version"] for note in notes(once[0], "consensus")]
    assert versions == [1, 2, 3]
    assert all(note["distance"] > 0 for note in notes(once[0], "consensus"))


def test_the_oracle_finds_every_promise_kept(once):
    verdict = judge(tape.read_run(once[0]))
    assert verdict.ok, str(verdict)
    assert (verdict.merges, verdict.rejoins, verdict.ended) == (3, 1, "finished")


def test_a_tape_holds_no_path(once):
    assert str(once[0].parent) not in (once[0] / tape.TAPE).read_text()


@pytest.mark.parametrize("fault", [
    {"kind": "freeze", "target": "learner-2", "at_progress": 0.3, "for_s": 1.0},
    {"kind": "syncer_loss", "target": "syncer", "at_progress": 0.3, "for_s": 1.0},
    {"kind": "partition", "target": "learner-0", "at_progress": 0.3, "for_s": 1.0},
], ids=lambda fault: fault["kind"])  # fmt: skip
def test_a_fault_in_the_lab_costs_no_token(fault, tmp_path):
    summary = run(gossip(faults=[fault], num_learners=3), tmp_path / "run")
    assert summary["outcome"] == "finished"
    assert summary["ledger_exact"]
    verdict = judge(tape.read_run(tmp_path / "run"))
    assert verdict.ok, str(verdict)
