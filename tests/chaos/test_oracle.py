"""The oracle bites: a tape in which one promise is broken on purpose, for each promise."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from chaos_helpers import undergo

from farflung.chaos.oracle import judge
from farflung.chaos.plan import Fault
from farflung.chaos.verdict import INVARIANTS, Verdict
from farflung.methods import decoupled
from farflung.tape import Record

METHOD = decoupled(num_fragments=2, sync_every_steps=4, lease_s=1.0, quorum=2)
POLICY = msgspec.to_builtins(METHOD.policy)
Edit = Callable[[list[Record]], None]


@pytest.fixture(scope="module")
def sound() -> list[Record]:
    """A tape with a rejoin and a wait, in which nothing is wrong."""
    ordeal = undergo(
        METHOD,
        Fault(kind="kill", target="learner-1", at_s=2.0),
        Fault(kind="freeze", target="learner-0", at_s=4.0, for_s=2.0),
        Fault(kind="freeze", target="learner-2", at_s=4.0, for_s=2.0),
    )
    assert ordeal.verdict.ok, ordeal.story
    assert ordeal.notes("waiting"), ordeal.story
    return ordeal.world.tape.records


def copied(records: list[Record]) -> list[Record]:
    """With data of its own."""
    return [Record(r.t, r.node, r.seq, r.kind, json.loads(json.dumps(r.data))) for r in records]


def find(records: list[Record], of_type: str, nth: int = 0, /, **wanted: Any) -> int:
    """Index of the nth record of a type; `wanted` is looked up in its data, and in what lies inside."""

    def fits(record: Record) -> bool:
        inside = [record.data, *(v for v in record.data.values() if isinstance(v, dict))]
        return all(any(d.get(key) == value for d in inside) for key, value in wanted.items())

    found = [i for i, r in enumerate(records) if r.type == of_type and fits(r)]
    return found[nth]


def note(records: list[Record], kind: str, nth: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = records[find(records, "Note", nth, kind=kind)].data["data"]
    return found


# ---- one edit for each way to break a promise ----------------------------------------------------------


def a_version_is_skipped(records: list[Record]) -> None:
    records[find(records, "MergeDone", 3)].data["version"] += 1


def a_learner_goes_back(records: list[Record]) -> None:
    adopted = [r for r in records if r.data.get("report", {}).get("adopted")]
    adopted[-1].data["report"]["adopted"][0][1] = 1


def a_contribution_is_merged_in_two_merges(records: list[Record]) -> None:
    one, two = (records[find(records, "Merge", n, fragment=0)].data["parts"] for n in (1, 2))
    two[0] = one[0]


def a_contribution_is_merged_twice_in_one(records: list[Record]) -> None:
    parts = records[find(records, "Merge", 2)].data["parts"]
    parts.append(parts[0])


def tokens_have_no_fate(records: list[Record]) -> None:
    discarded = note(records, "ledger")["token_fragments"]["discarded"]
    discarded["overlap"] -= 1


def a_report_is_counted_twice(records: list[Record]) -> None:
    """The ledger adds up, and is wrong all the same."""
    ledger = note(records, "ledger")
    ledger["tokens_trained"] += 10
    ledger["token_fragments"]["trained"] += 20
    ledger["token_fragments"]["discarded"]["overlap"] += 20


def merged_tokens_are_called_discarded(records: list[Record]) -> None:
    fates = note(records, "ledger")["token_fragments"]
    fates["merged"] -= 10
    fates["discarded"]["overlap"] += 10


def tokens_are_in_flight_at_the_end(records: list[Record]) -> None:
    fates = note(records, "ledger")["token_fragments"]
    fates["discarded"]["overlap"] -= 10
    fates["in_flight"] += 10


def the_ledger_is_missing(records: list[Record]) -> None:
    del records[find(records, "Note", kind="ledger")]


def a_merge_has_one_part(records: list[Record]) -> None:
    del records[find(records, "Merge", 2)].data["parts"][1:]


def a_round_opens_beside_another(records: list[Record]) -> None:
    index = find(records, "Note", 2, kind="round_open")
    records.insert(index, records[index])


def a_merge_begins_twice(records: list[Record]) -> None:
    index = find(records, "Merge", 2)
    data = records[index].data
    records.insert(index, Record(records[index].t, "syncer", 0, "action", {**data, "parts": []}))


def a_learner_is_told_merged_too_early(records: list[Record]) -> None:
    index = find(records, "MergeDone", 2)
    told = find(records[index:], "Send", type="FateOf", fate="merged") + index
    records.insert(index - 1, records[told])


def a_version_is_announced_too_early(records: list[Record]) -> None:
    index = find(records, "MergeDone", 2)
    told = find(records[index:], "Send", type="Announce") + index
    records.insert(index - 1, records[told])


def a_wait_has_no_reason(records: list[Record]) -> None:
    note(records, "waiting")["reason"] = ""


def a_wait_has_no_deadline(records: list[Record]) -> None:
    note(records, "waiting")["deadline_s"] = None


def a_round_has_no_timer(records: list[Record]) -> None:
    opened = find(records, "Note", 2, kind="round_open")
    name = f"round.{records[opened].data['data']['fragment']}"
    after = find(records[opened:], "SetTimer", name=name) + opened
    del records[after]


def a_trainer_is_stopped_for_no_reason(records: list[Record]) -> None:
    stopped = records[find(records, "Post", type="RunUntil", step=0)]
    stopped.data["command"]["reason"] = ""


def a_fresh_learner_is_the_donor(records: list[Record]) -> None:
    """Everything of it that was merged came from another incarnation."""
    donor = records[find(records, "Send", type="Donate")].data["message"]["transfer"].split(".")[2]
    for record in records:
        if record.type == "Merge":
            for part in record.data["parts"]:
                part["object"] = part["object"].replace(f"{donor}.1.", f"{donor}.9.")


def a_stale_learner_is_the_donor(records: list[Record]) -> None:
    """It never says that it adopted anything."""
    donor = records[find(records, "Send", type="Donate")].data["message"]["transfer"].split(".")[2]
    join = next(
        r for r in records if r.type == "MessageArrived" and r.data["message"].get("learner") == donor
    )
    for record in records:
        if record.type == "MessageArrived" and record.data["connection"] == join.data["connection"]:
            record.data["message"]["adopted"] = []


def a_joiner_holds_other_bits(records: list[Record]) -> None:
    note(records, "rejoin_proved", -1)["inner_equal"] = False


def a_mismatch_raises_an_alarm(records: list[Record]) -> None:
    data = {"type": "Note", "kind": "alarm", "data": {"what": "install_mismatch", "detail": "learner-1"}}
    records.append(Record(records[-1].t, "syncer", 0, "action", data))


def merging_stops(records: list[Record]) -> None:
    """Learners train on, and nothing is ever merged again."""
    index = find(records, "Merge", 4)
    gone = ("Merge", "MergeDone", "Finished", "round_open", "merged", "ledger")
    records[index:] = [r for r in records[index:] if r.type not in gone and r.data.get("kind") not in gone]


BREAKS: dict[str, list[Edit]] = {
    "versions only grow": [a_version_is_skipped, a_learner_goes_back],
    "no contribution is merged twice": [
        a_contribution_is_merged_in_two_merges, a_contribution_is_merged_twice_in_one,
    ],
    "every token has a fate": [
        tokens_have_no_fate, a_report_is_counted_twice, merged_tokens_are_called_discarded,
        tokens_are_in_flight_at_the_end, the_ledger_is_missing,
    ],
    "no merge below quorum": [a_merge_has_one_part],
    "never two rounds of one fragment": [a_round_opens_beside_another, a_merge_begins_twice],
    "no answer before its merge": [a_learner_is_told_merged_too_early, a_version_is_announced_too_early],
    "a wait has a deadline and a reason": [
        a_wait_has_no_reason, a_wait_has_no_deadline, a_round_has_no_timer, a_trainer_is_stopped_for_no_reason,
    ],
    "a donor has lineage": [a_fresh_learner_is_the_donor, a_stale_learner_is_the_donor],
    "a rejoin is proven": [a_joiner_holds_other_bits, a_mismatch_raises_an_alarm],
    "progress while enough learners live": [merging_stops],
}  # fmt: skip


def verdict_after(records: list[Record], edit: Edit, **options: Any) -> Verdict:
    changed = copied(records)
    edit(changed)
    return judge(changed, policy=POLICY, **options)


def test_every_invariant_has_a_tape_that_breaks_it() -> None:
    assert tuple(BREAKS) == INVARIANTS


@pytest.mark.parametrize(
    ("invariant", "edit"),
    [(name, edit) for name, edits in BREAKS.items() for edit in edits],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_broken_promise_is_found(sound, invariant, edit) -> None:
    bound = {"bound_s": 1.5} if edit is merging_stops else {}
    verdict = verdict_after(sound, edit, **bound)
    assert invariant in {f.invariant for f in verdict.findings}, str(verdict)
    assert invariant in str(verdict) and not verdict.as_dict()["ok"]


def test_a_sound_tape_is_found_sound_and_counted(sound) -> None:
    verdict = judge(sound, policy=POLICY)
    assert verdict.ok and verdict.ended == "finished" and verdict.rejoins == 1
    assert verdict.merges > 10 and verdict.records == len(sound)
    assert "all 10 promises kept" in str(verdict)


def test_a_planned_fault_excuses_those_whom_it_holds_up(sound) -> None:
    plan = [
        {"kind": "fault", "t": 0.0, "target": f"learner-{i}", "fault": "partition", "for_s": 1e6}
        for i in (0, 1)
    ]
    verdict = verdict_after(sound, merging_stops, metrics=plan, bound_s=1.5)
    assert "progress while enough learners live" not in {f.invariant for f in verdict.findings}


def test_a_tape_that_breaks_off_is_judged_as_far_as_it_goes(sound) -> None:
    verdict = judge(sound[: len(sound) // 2], policy=POLICY)
    assert verdict.ok and verdict.ended is None and "cut off" in str(verdict)


def test_a_syncer_that_comes_back_with_older_versions_is_found() -> None:
    ordeal = undergo(METHOD, Fault(kind="syncer_loss", target="syncer", at_s=2.0, for_s=0.5))
    records = copied(ordeal.world.tape.records)
    restored = json.loads(msgspec.json.encode(ordeal.world.syncer.header()))
    index = next(i for i, r in enumerate(records) if r.node == "syncer.2")
    header = Record(0.0, "syncer.2", -1, "header", {**restored, "policy": POLICY})
    records.insert(index, header)
    assert judge(records).ok, str(judge(records))
    header.data["restored"]["snapshot"]["versions"][0] -= 1
    assert "restored at" in str(judge(records))
