import pytest

from farflung.core.schedule import check, offsets
from farflung.protocol.lockstep import joiner_step, snapshot_step

SCHEDULES = [(H, P, tau) for H in (1, 4, 6) for P in range(1, H + 1) for tau in range(H)]


@pytest.mark.parametrize(("H", "P", "tau"), SCHEDULES)
def test_round_r_is_the_rth_positive_step_of_its_fragments_offset(H: int, P: int, tau: int) -> None:
    for p, offset in enumerate(offsets(H, P)):
        wanted = [step for step in range(1, 5 * H) if step % H == offset][:3]
        assert [snapshot_step(p, r, H, P) for r in (1, 2, 3)] == wanted


@pytest.mark.parametrize(("H", "P", "tau"), SCHEDULES)
def test_a_newborn_enters_at_step_zero(H: int, P: int, tau: int) -> None:
    check(H, P, tau)
    assert joiner_step([0] * P, H, tau) == 0


@pytest.mark.parametrize(("H", "P", "tau"), SCHEDULES)
def test_a_joiner_enters_before_the_first_snapshot_that_its_versions_lack(H: int, P: int, tau: int) -> None:
    """For every state that a run of learners in step passes through."""
    for now in range(1, 4 * H):
        versions = [sum(snapshot_step(p, r, H, P) + tau <= now for r in range(1, 6)) for p in range(P)]
        step = joiner_step(versions, H, tau)
        todo = [snapshot_step(p, v + 1, H, P) for p, v in enumerate(versions)]
        assert 0 <= step < min(todo), (now, versions)
        assert step <= now
