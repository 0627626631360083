"""A learner that returns goes on with its own method state if it is at most H own steps old, else at zero."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from protocol_helpers import RUN, Desk, Island, notes, posted, said

from farflung.protocol import events as ev
from farflung.protocol import mailbox as box
from farflung.protocol import messages as msg
from farflung.protocol import own_state, snapshot
from farflung.protocol.own_state import Life, OwnFragment, OwnState

H = 4
GOOD = OwnState(
    run=RUN, incarnation=1, step=1, fragments=[OwnFragment(digest="s0"), OwnFragment(digest="s1")]
)


def kept(**changes: Any) -> OwnState:
    return msgspec.structs.replace(GOOD, **changes)


def died(steps: int = H + 1, **policy: Any) -> Desk:
    """Learners a and b; a has trained so many steps when its process is killed."""
    desk = Desk("a", "b", **policy)
    for _ in range(steps):
        desk.boundary("a")
    desk.say("a", msg.TrainerLost(reason="killed"))
    return desk


def back(desk: Desk, own: OwnState | None) -> msg.Install:
    """A new process of a, with what it found."""
    desk.join("a", own=own)
    for transfer in list(desk.machine.admission.transfers):
        desk.say("b", msg.StateFailed(transfer=transfer, reason="busy"))
    return desk.heard("a", msg.Install)[-1]


def noted(desk: Desk, **found: Any) -> dict[str, Any]:
    """What the hub notes of a's own state once it is installed."""
    (note,) = notes(desk.install("a", **found), "own_state")
    return note


# ---- the rule --------------------------------------------------------------------------------------------


def test_own_state_that_is_h_steps_old_is_taken_and_proven() -> None:
    desk = died()
    assert back(desk, GOOD).own == [False, False], desk.story()
    note = noted(desk, own_digests=["s0", "s1"])
    assert (note["taken"], note["age_steps"], note["digests"]) == ("own", H, ["s0", "s1"])
    assert desk.tape.notes("rejoin_proved")[-1]["own_equal"] is True
    assert desk.member("a").state == "training"


def test_own_state_that_is_one_step_older_begins_at_zero_and_is_counted() -> None:
    desk = died(H + 2)
    assert back(desk, GOOD).own is None, desk.story()
    note = noted(desk, own_digests=["z", "z"])
    assert (note["taken"], note["reason"], note["age_steps"]) == ("zero", "old", H + 1)
    assert "own_equal" not in desk.tape.notes("rejoin_proved")[-1]


def h_rule(refusal: Callable[..., str]) -> bool:
    """Whether a rule tells H own steps from one more, and no step from none."""
    known = {"run": RUN, "incarnation": 2, "sync_every_steps": H, "waiting": ()}

    def said(age: int) -> str:
        return refusal(kept(step=10), Life(1, 10 + age, [None, None]), **known)

    return [said(age) for age in (-1, 0, H, H + 1)] == ["", "", "", "old"]


@pytest.mark.parametrize("by", [-1, 1])
def test_a_rule_that_is_off_by_one_step_is_seen(by: int) -> None:
    def mutant(own: OwnState, life: Life, *, sync_every_steps: int, **known: Any) -> str:
        return own_state.refusal(own, life, sync_every_steps=sync_every_steps + by, **known)

    assert h_rule(own_state.refusal)
    assert not h_rule(mutant)


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (OwnState(problem="missing"), "missing"),
        (OwnState(problem="damaged"), "damaged"),
        (kept(problem="damaged"), "damaged"),
        (kept(run="another"), "run"),
        (kept(incarnation=0), "lineage"),
        (kept(incarnation=2), "lineage"),
        (kept(fragments=GOOD.fragments[:1]), "lineage"),
    ],
)
def test_what_must_not_be_used_is_refused_by_name(own: OwnState, reason: str) -> None:
    desk = died()
    assert back(desk, own).own is None, desk.story()
    assert (noted(desk)["taken"], desk.tape.notes("own_state")[-1]["reason"]) == ("zero", reason)


def test_a_learner_with_other_bits_than_it_kept_never_trains() -> None:
    desk = died()
    back(desk, GOOD)
    actions = desk.install("a", own_digests=["s0", "other"])
    assert [m.reason for m in said(actions, msg.Stop)] == ["reset"], desk.story()
    assert desk.tape.notes("alarm")[-1]["detail"] == "a: not own_equal"


def test_a_method_without_own_state_leaves_no_note() -> None:
    desk = died()
    back(desk, None)
    assert not notes(desk.install("a"), "own_state"), desk.story()


def test_a_birth_is_no_rejoin() -> None:
    desk = Desk()
    desk.join("a", own=OwnState(problem="missing"))
    desk.say("a", msg.Seeded(), finite=True, digests=["0.0", "1.0"])
    assert not notes(desk.install("a"), "own_state"), desk.story()


# ---- lineage ---------------------------------------------------------------------------------------------


def test_a_life_that_was_never_proven_does_not_age_what_it_found() -> None:
    """It died while it installed, and may have kept the same once more under its own number."""
    for incarnation in (1, 2):
        desk = died()
        back(desk, GOOD)
        desk.say("a", msg.TrainerLost(reason="killed again"))
        assert back(desk, kept(incarnation=incarnation)).own == [False, False], desk.story()


def test_a_learner_that_starts_over_while_it_installs_is_not_stopped_and_keeps_what_it_found() -> None:
    """The version that it was to install is gone: the same process joins again, on the same connection."""
    desk = died()
    back(desk, GOOD)
    line, method = desk.lines["a"], desk.machine.admission.method_digest
    plain = {"protocol": msg.PROTOCOL, "run": RUN, "fingerprint": "f", "layout": "{}", "method": method}
    desk.say("a", msg.Join(**plain, learner="a", own=GOOD))
    assert not desk.heard("a", msg.Stop), desk.story()
    assert (desk.lines["a"], desk.member("a").incarnation) == (line, 3)
    assert desk.heard("a", msg.Install)[-1].own == [False, False]


def test_what_a_life_before_the_last_one_kept_is_refused() -> None:
    desk = died()
    back(desk, GOOD)
    desk.install("a", own_digests=["s0", "s1"])
    desk.say("a", msg.TrainerLost(reason="killed again"))
    assert back(desk, GOOD).own is None, desk.story()
    assert noted(desk)["reason"] == "lineage"


# ---- committed by fate -----------------------------------------------------------------------------------

SENT = [OwnFragment(digest="s0", round=1, pending="p0"), OwnFragment(digest="s1")]


def sent(desk: Desk) -> None:
    """The contribution of a to round 1 of fragment 0 lies at the hub."""
    desk.contribute("a", 1)
    desk.say("a", msg.TrainerLost(reason="killed"))


def test_a_contribution_that_was_merged_after_its_sender_died_is_part_of_its_state() -> None:
    desk = Desk("a", "b", quorum=2)
    desk.boundary("b")
    sent(desk)
    desk.merged(desk.round("b"))
    assert back(desk, kept(fragments=SENT)).own == [True, False], desk.story()
    assert noted(desk, own_digests=["p0", "s1"])["taken"] == "own"


def test_a_contribution_that_was_not_merged_is_not() -> None:
    desk = Desk("a", "b")
    desk.boundary("a", snapshots=[(0, 1)])
    desk.say("a", msg.TrainerLost(reason="killed before it was sent"))
    assert back(desk, kept(fragments=SENT)).own == [False, False], desk.story()
    assert noted(desk, own_digests=["s0", "s1"])["taken"] == "own"


def test_a_contribution_that_a_merge_made_not_finite_is_not() -> None:
    desk = Desk("a", "b", quorum=2)
    desk.boundary("b")
    sent(desk)
    desk.merged(desk.round("b"), finite=False)
    assert back(desk, kept(fragments=SENT)).own == [False, False], desk.story()


def test_while_its_last_contribution_waits_nobody_knows_which_state_holds() -> None:
    desk = Desk("a", "b", quorum=2)
    desk.boundary("b")
    sent(desk)
    assert back(desk, kept(fragments=SENT)).own is None, desk.story()
    assert noted(desk)["reason"] == "undecided"


def test_own_state_behind_what_was_merged_is_refused() -> None:
    desk = Desk("a", "b", quorum=1)
    desk.boundary("b")
    desk.merged(desk.round("a"))
    assert desk.member("a").life.included == [1, None], desk.story()
    desk.say("a", msg.TrainerLost(reason="killed"))
    behind = [OwnFragment(digest="s0", round=0, pending="p0"), OwnFragment(digest="s1")]
    assert back(desk, kept(fragments=behind)).own is None
    assert noted(desk)["reason"] == "lineage"


# ---- the learner -----------------------------------------------------------------------------------------


def ready(island: Island, **changes: Any) -> list[Any]:
    return island.report(box.Ready(learner="a", fingerprint="f", layout="{}", method="m", **changes))


def test_a_learner_says_what_it_found_and_posts_what_the_hub_decides() -> None:
    island = Island()
    ready(island, own=GOOD)
    (join,) = said(island.take(ev.LinkUp()), msg.Join)
    assert join.own == GOOD
    island.welcome()
    plain = {"cursor": 0, "step": 0, "syncer_step": 0, "state": None, "reason": "cold"}
    island.hear(msg.Install(versions=[0, 0], own=[True, False], **plain))
    actions = [a for p in (0, 1) for a in island.take(ev.Fetched(fragment=p, version=0))]
    (load,) = posted(actions, box.Load)
    assert load.own == [True, False], island.story()
    proof = {
        "versions": [0, 0],
        "digests": ["d", "d"],
        "inner_digest": None,
        "lr": None,
        "cursor": 0,
        "step": 0,
    }
    (installed,) = said(island.report(box.Loaded(**proof, own_digests=["p0", "s1"])), msg.Installed)
    assert installed.own_digests == ["p0", "s1"]


def test_a_learner_whose_numbers_broke_does_not_go_on_with_what_it_found() -> None:
    island = Island()
    ready(island, own=GOOD)
    island.take(ev.LinkUp())
    island.welcome()
    island.install([0, 0])
    (join,) = said(island.hear(msg.Stop(reason="reset")), msg.Join)
    assert join.own == OwnState(problem="reset"), island.story()


# ---- orderly stops ---------------------------------------------------------------------------------------


def resumed(found: str) -> tuple[Desk, list[Any]]:
    """A run that was stopped in order, and a back with what its save file gave."""
    desk = Desk("a", "b")
    desk.boundary("a")
    desk.machine.phase = "suspending"
    for name in ("a", "b"):
        desk.say(name, msg.Saved(step=1, digest=f"all of {name}"))
    saved = snapshot.decode(snapshot.encode(snapshot.snapshot(desk.machine)))
    fresh = Desk()
    snapshot.restore(fresh.machine, saved, now=0.0)
    return fresh, fresh.join("a", incarnation=1, held=[0, 0], sequence=1, saved=found)


def test_a_learner_proves_that_it_holds_what_it_saved() -> None:
    desk, actions = resumed("all of a")
    (note,) = notes(actions, "resume_proved")
    assert (note["state_equal"], note["digest"]) == (True, "all of a"), desk.story()
    assert not notes(
        desk.join("a", incarnation=1, held=[0, 0], sequence=1, saved="all of a"), "resume_proved"
    )


def test_a_learner_that_holds_something_else_starts_again() -> None:
    desk, actions = resumed("other bits")
    assert not notes(actions, "resume_proved")[0]["state_equal"]
    assert [m.reason for m in said(actions, msg.Stop)] == ["reset"], desk.story()
    assert desk.member("a").state == "gone"


def test_the_hub_remembers_how_a_life_ended_over_an_orderly_stop() -> None:
    desk, _ = resumed("all of a")
    assert desk.member("a").life == Life(1, 1, [None, None])
