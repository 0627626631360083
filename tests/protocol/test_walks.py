import pytest

from farflung.testing import walk


@pytest.mark.parametrize("seed", range(60))
def test_whatever_befalls_a_run_it_ends_with_exact_books(seed: int) -> None:
    walk(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(60, 1060, 100))
def test_whatever_befalls_a_thousand_runs_they_end_with_exact_books(first: int) -> None:
    for seed in range(first, first + 100):
        walk(seed)
