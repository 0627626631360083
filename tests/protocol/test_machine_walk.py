"""The machines alone through thousands of disasters: nothing that must hold may break."""

import pytest

from farflung.testing.machine_plan import unfold
from farflung.testing.machine_walk import Failure, attempt, first_failure, walk_machines, walk_many


def test_a_thousand_walks_of_two_hundred_choices_break_nothing() -> None:
    events, failure = first_failure(range(1000))
    assert failure is None, failure
    assert events > 200_000


@pytest.mark.slow
def test_twenty_thousand_walks_break_nothing() -> None:
    assert walk_many(0, 20_000) > 4_000_000


def test_a_walk_is_a_function_of_its_seed() -> None:
    assert _log(7) == _log(7) != _log(8)


def _log(seed: int) -> list[str]:
    result = attempt(unfold(seed))
    assert not isinstance(result, tuple)
    return [repr(entry) for entry in result.log]


def test_a_broken_invariant_is_told_as_seed_and_shortest_story(monkeypatch: pytest.MonkeyPatch) -> None:
    from farflung.protocol.merging import Merging

    needed = Merging._needed
    monkeypatch.setattr(Merging, "_needed", lambda self, round: max(1, needed(self, round) - 1))
    failure = next(f for seed in range(1000) if isinstance(f := walk_machines(seed), Failure))
    assert failure.name == "a merge below quorum"
    assert len(failure.script) < 60 < len(failure.plan.script)
    assert len(failure.story) <= 40
    text = str(failure)
    assert text.startswith(f"seed {failure.seed}: a merge below quorum")
    assert "'type': 'Merge'" in text
