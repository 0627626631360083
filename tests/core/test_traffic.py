"""Closed forms of what synchronisation costs, against sums written out and the figures of the papers."""

import pytest

from farflung.core import traffic
from farflung.core.codecs import get_codec
from farflung.core.traffic import Load, all_gather, data_parallel, fewer, framed_bytes, hub, partners, ring
from farflung.units import CHUNK_BYTES, FRAME_BYTES

N = 4096 * 64
DENSE = 4 * N


def ring_by_hand(dense: int, num_learners: int) -> int:
    """Reduce-scatter and all-gather, message by message: M parts, M - 1 steps each; needs M to divide `dense`."""
    part = dense // num_learners
    return sum(part for _ in range(2) for _ in range(num_learners - 1))


@pytest.mark.parametrize("M", [1, 2, 4, 8, 64])
def test_a_ring_sends_what_its_messages_add_up_to(M: int) -> None:
    assert ring(DENSE, M) == Load(ring_by_hand(DENSE, M), ring_by_hand(DENSE, M))


@pytest.mark.parametrize("M", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("codec", ["top64-2bit-12bit", "dct-top32-int8-12bit", "fp32"])
def test_an_all_gather_against_a_ring_is_2_dense_over_m_payload(M: int, codec: str) -> None:
    payload = get_codec(codec).size_bytes(N)
    assert fewer(ring(DENSE, M).up, all_gather(payload, M).up) == pytest.approx(2 * DENSE / (M * payload))
    assert all_gather(payload, M) == partners(payload, traffic.mean_partners("complete", M, 64))


def test_through_a_hub_a_learner_sends_the_same_whatever_their_number() -> None:
    payload = get_codec("top64-2bitx4096-12bit").size_bytes(N)
    assert hub(payload, DENSE) == Load(payload, DENSE)
    ratios = [fewer(ring(DENSE, M).up, hub(payload, DENSE).up) for M in (2, 4, 1000)]
    assert ratios == pytest.approx([(2 - 2 / M) * DENSE / payload for M in (2, 4, 1000)])


def test_sparseloco_is_146_times_smaller_than_dense_but_for_its_bin_means() -> None:
    selected, means = 64 * 14 * 64 // 8, 64 * 64 // 4096 * 8
    assert fewer(DENSE, selected) == pytest.approx(146.2857, abs=1e-4)
    assert get_codec("top64-2bitx4096-12bit").size_bytes(N) == selected + means


def test_data_parallel_is_a_ring_a_step() -> None:
    assert data_parallel(DENSE, 4, 30) == ring(DENSE, 4).times(30) == Load(45 * DENSE, 45 * DENSE)


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES - 1])
def test_an_object_counts_with_a_header_for_each_chunk(num_bytes: int) -> None:
    chunks = max(1, (num_bytes + CHUNK_BYTES - 1) // CHUNK_BYTES)
    assert framed_bytes(num_bytes) == num_bytes + chunks * FRAME_BYTES


@pytest.mark.parametrize("num_bytes", [16_000, 2**20, 3 * CHUNK_BYTES + 1])
def test_headers_stay_below_3_percent_from_16_kb_on(num_bytes: int) -> None:
    assert 0 < framed_bytes(num_bytes) / num_bytes - 1 < 0.03


@pytest.mark.parametrize(
    ("matching", "M", "expected"),
    [("random", 5, 0.8), ("ring", 8, 2), ("complete", 65, 64 / 65), ("hypercube", 8, 1), ("random", 1, 0)],
)
def test_partners_on_average(matching: str, M: int, expected: float) -> None:
    assert traffic.mean_partners(matching, M, 63) == pytest.approx(expected)


def test_nothing_has_no_ratio_and_nobody_no_ring() -> None:
    assert fewer(0, 5) is None and fewer(5, 0) is None
    with pytest.raises(ValueError, match="num_learners = 0"):
        ring(DENSE, 0)
