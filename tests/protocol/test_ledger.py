from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from farflung.protocol.ledger import Ledger


def one(carries: bool = False) -> Ledger:
    """One fragment; learner "a" has trained 10 tokens."""
    ledger = Ledger(1, carries)
    ledger.trained("a", 10)
    return ledger


def books(ledger: Ledger) -> tuple[int, dict[str, int], int]:
    ledger.validate()
    return ledger.merged, ledger.discarded, ledger.in_flight


def test_each_token_counts_once_in_every_fragment() -> None:
    ledger = Ledger(3, False)
    ledger.trained("a", 10)
    assert ledger.trained_token_fragments == 30
    assert books(ledger) == (0, {}, 30)


def test_a_merged_contribution_counts_as_merged_at_once() -> None:
    ledger = one()
    ledger.snapshotted("a", 0, 1)
    ledger.settled("a", 0, 1, "merged")
    assert books(ledger) == (10, {}, 0)


def test_work_after_a_merged_snapshot_that_is_overwritten_is_overlap() -> None:
    ledger = one()
    ledger.snapshotted("a", 0, 1)
    ledger.trained("a", 3)
    ledger.settled("a", 0, 1, "merged")
    ledger.adopted("a", 0)
    assert books(ledger) == (10, {"overlap": 3}, 0)


def test_work_that_was_never_contributed_and_is_overwritten_is_superseded() -> None:
    ledger = one()
    ledger.adopted("a", 0)
    assert books(ledger) == (0, {"superseded": 10}, 0)


@pytest.mark.parametrize("fate", ["late", "stale_base", "rejected"])
def test_a_refused_contribution_is_discarded_by_its_name_when_it_is_overwritten(fate: str) -> None:
    ledger = one()
    ledger.snapshotted("a", 0, 1)
    ledger.settled("a", 0, 1, fate)  # type: ignore[arg-type]
    assert books(ledger) == (0, {}, 10)
    ledger.trained("a", 3)
    ledger.adopted("a", 0)
    assert books(ledger) == (0, {fate: 10, "superseded": 3}, 0)


def test_a_refused_contribution_may_be_sent_again_with_what_followed_it() -> None:
    ledger = one()
    ledger.snapshotted("a", 0, 1)
    ledger.settled("a", 0, 1, "late")
    ledger.trained("a", 3)
    ledger.snapshotted("a", 0, 2)
    ledger.settled("a", 0, 2, "merged")
    assert books(ledger) == (13, {}, 0)


def test_a_cancelled_contribution_goes_back_into_its_window() -> None:
    ledger = one()
    ledger.snapshotted("a", 0, 1)
    ledger.settled("a", 0, 1, "cancelled")
    assert books(ledger) == (0, {}, 10)
    ledger.snapshotted("a", 0, 2)
    ledger.settled("a", 0, 2, "merged")
    assert books(ledger) == (10, {}, 0)


@pytest.mark.parametrize(
    ("fate", "wanted"),
    [("merged", (10, {"overlap": 3}, 0)), ("late", (0, {"late": 10, "superseded": 3}, 0))],
)
def test_a_contribution_whose_base_was_overwritten_waits_for_its_fate(fate: str, wanted: tuple) -> None:
    ledger = one()
    ledger.snapshotted("a", 0, 1)
    ledger.trained("a", 3)
    ledger.adopted("a", 0)
    assert books(ledger) == (0, {}, 13)
    ledger.settled("a", 0, 1, fate)  # type: ignore[arg-type]
    assert books(ledger) == wanted


def test_a_lost_learner_takes_its_unmerged_work_with_it() -> None:
    ledger = one()
    ledger.snapshotted("a", 0, 1)
    ledger.trained("a", 3)
    ledger.lost("a", arrived=set())
    assert books(ledger) == (0, {"learner_lost": 13}, 0)


def test_what_a_lost_learner_had_handed_over_is_still_merged() -> None:
    ledger = one()
    ledger.snapshotted("a", 0, 1)
    ledger.trained("a", 3)
    ledger.lost("a", arrived={(0, 1)})
    assert books(ledger) == (0, {"learner_lost": 3}, 10)
    ledger.settled("a", 0, 1, "merged")
    assert books(ledger) == (10, {"learner_lost": 3}, 0)


def test_refused_work_of_a_lost_learner_keeps_the_name_of_its_refusal() -> None:
    ledger = one()
    ledger.snapshotted("a", 0, 1)
    ledger.settled("a", 0, 1, "rejected")
    ledger.lost("a", arrived=set())
    assert books(ledger) == (0, {"rejected": 10}, 0)


def test_mix_and_rebase_carry_unmerged_work_over_an_adoption() -> None:
    ledger = one(carries=True)
    ledger.adopted("a", 0)
    ledger.snapshotted("a", 0, 1)
    ledger.settled("a", 0, 1, "late")
    ledger.trained("a", 3)
    ledger.adopted("a", 0)
    assert books(ledger) == (0, {}, 13)
    ledger.snapshotted("a", 0, 2)
    ledger.settled("a", 0, 2, "merged")
    assert books(ledger) == (13, {}, 0)


def test_mix_and_rebase_do_not_carry_what_was_merged() -> None:
    ledger = one(carries=True)
    ledger.snapshotted("a", 0, 1)
    ledger.trained("a", 3)
    ledger.settled("a", 0, 1, "merged")
    ledger.adopted("a", 0)
    ledger.snapshotted("a", 0, 2)
    ledger.settled("a", 0, 2, "merged")
    assert books(ledger) == (13, {}, 0)


@pytest.mark.parametrize("carries", [False, True])
def test_a_repeated_fate_changes_nothing(carries: bool) -> None:
    ledger = one(carries)
    ledger.snapshotted("a", 0, 1)
    ledger.settled("a", 0, 1, "merged")
    for fate in ("merged", "late"):
        ledger.settled("a", 0, 1, fate)  # type: ignore[arg-type]
    ledger.settled("a", 0, 99, "merged")
    assert books(ledger) == (10, {}, 0)


def test_a_broken_ledger_is_named() -> None:
    ledger = one()
    ledger.merged = 1
    with pytest.raises(AssertionError, match="does not add up"):
        ledger.validate()


class LedgerWalk(RuleBasedStateMachine):
    """Anything that a syncer may tell a ledger, in any order: the books are always exact."""

    carries = False

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(2, self.carries)
        self.round = 0
        self.merged_tokens = 0

    learners = st.sampled_from(["a", "b"])
    fragments = st.integers(0, 1)
    fates = st.sampled_from(["merged", "late", "stale_base", "rejected", "cancelled", "learner_lost"])

    @rule(learner=learners, tokens=st.integers(0, 9))
    def train(self, learner: str, tokens: int) -> None:
        self.ledger.trained(learner, tokens)

    @rule(learner=learners, fragment=fragments, fate=fates)
    def snapshot(self, learner: str, fragment: int, fate: str) -> None:
        for older in self.ledger.unsettled(learner, fragment):
            self.ledger.settled(learner, fragment, older, fate)  # type: ignore[arg-type]
        self.round += 1
        self.ledger.snapshotted(learner, fragment, self.round)

    @rule(learner=learners, fragment=fragments)
    def adopt(self, learner: str, fragment: int) -> None:
        self.ledger.adopted(learner, fragment)

    @precondition(lambda self: self.round)
    @rule(learner=learners, fragment=fragments, fate=fates, back=st.integers(0, 3))
    def settle(self, learner: str, fragment: int, fate: str, back: int) -> None:
        self.ledger.settled(learner, fragment, self.round - back, fate)  # type: ignore[arg-type]

    @rule(learner=learners, arrived=st.booleans())
    def lose(self, learner: str, arrived: bool) -> None:
        open_rounds = {(p, r) for p in range(2) for r in self.ledger.unsettled(learner, p)}
        self.ledger.lost(learner, open_rounds if arrived else set())

    @invariant()
    def every_token_has_a_fate(self) -> None:
        self.ledger.validate()

    @invariant()
    def nothing_is_negative_and_what_was_merged_stays_merged(self) -> None:
        assert self.ledger.in_flight >= 0
        assert all(n > 0 for n in self.ledger.discarded.values())
        assert self.ledger.merged >= self.merged_tokens
        self.merged_tokens = self.ledger.merged


class CarryingLedgerWalk(LedgerWalk):
    carries = True


quick = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLedgerWalk = LedgerWalk.TestCase
TestLedgerWalk.settings = quick
TestCarryingLedgerWalk = CarryingLedgerWalk.TestCase
TestCarryingLedgerWalk.settings = quick


class TokenByToken:
    """The ledger written naively, for overwriting adoption: where is each single token?"""

    def __init__(self) -> None:
        self.places: list[str] = []

    def move(self, source: str, target: str) -> None:
        self.places = [target if place == source else place for place in self.places]

    def count(self, place: str) -> int:
        return self.places.count(place)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_the_ledger_agrees_with_one_that_follows_every_token(seed: int) -> None:
    draw, ledger, naive = Random(seed), Ledger(1, False), TokenByToken()
    for number in range(1, 12):
        tokens = draw.randrange(5)
        ledger.trained("a", tokens)
        naive.places += ["open"] * tokens
        ledger.snapshotted("a", 0, number)
        naive.move("open", "sent")
        later = draw.randrange(3)
        ledger.trained("a", later)
        naive.places += ["open"] * later
        fate = draw.choice(["merged", "late"])
        ledger.settled("a", 0, number, fate)  # type: ignore[arg-type]
        if draw.random() < 0.5:  # it is overwritten
            ledger.adopted("a", 0)
            naive.move("sent", fate)
            naive.move("open", "overlap" if fate == "merged" else "superseded")
        elif fate == "late":  # it is still in the parameters
            naive.move("sent", "open")
        else:
            naive.move("sent", "merged")
        ledger.validate()
        assert ledger.merged == naive.count("merged")
        for reason in ("overlap", "superseded", "late"):
            assert ledger.discarded.get(reason, 0) == naive.count(reason)
