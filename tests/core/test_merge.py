"""Merge rules against naive float64 versions and closed forms; the fused form against the plain one."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.merge import CANCEL_TOLERANCE, Segment, avg, merge, merge_and_step, rda, reanchor
from farflung.core.norms import ROW, l2_norm, row_norms
from farflung.core.outer import Momentum, Nesterov, Sgd

OUTERS = [Sgd(lr=0.7), Momentum(lr=0.7), Nesterov(lr=0.7)]


def _vectors(num, size, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=rng) * 10.0 ** (-i % 3) for i in range(num)]


def _weights(num):
    raw = [1.0 + (i * 7) % 5 for i in range(num)]
    return [w / math.fsum(raw) for w in raw]


def _naive_avg(deltas, weights):
    return sum(w * d.double() for w, d in zip(weights, deltas, strict=True))


def _naive_rda(deltas, weights):
    def phi(x):
        return x / x.norm() if x.norm() > 0 else x

    radius = sum(w * d.double().norm() for w, d in zip(weights, deltas, strict=True))
    return radius * phi(sum(w * phi(d.double()) for w, d in zip(weights, deltas, strict=True)))


def _whole(size, rule):
    return [Segment(start=0, stop=size, rule=rule)]


def _run(theta, deltas, weights, segments, outer, state, **kwargs):
    out_theta = torch.full_like(theta, torch.nan)
    out_state = {name: torch.full_like(value, torch.nan) for name, value in state.items()}
    result = merge_and_step(theta, deltas, weights, segments, outer, state, out_theta, out_state, **kwargs)
    return out_theta, out_state, result


# The rules


@given(num=st.integers(1, 9), size=st.integers(1, 3 * ROW), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_both_rules_equal_their_formulas_in_float64(num, size, seed):
    deltas, weights = _vectors(num, size, seed), _weights(num)
    for rule, naive in ((avg, _naive_avg), (rda, _naive_rda)):
        exact = naive(deltas, weights)
        error = (rule(deltas, weights).double() - exact).norm() / exact.norm()
        # A short averaged direction amplifies rounding; a single one (size 1) may nearly cancel.
        assert error < 2e-6 * (1 if size > 30 else 1000)


@pytest.mark.parametrize("rule", [avg, rda])
def test_one_contribution_comes_back_bit_for_bit_in_new_memory(rule):
    (delta,) = _vectors(1, 5000)
    out = rule([delta], [1.0])
    assert torch.equal(out, delta)
    assert out.data_ptr() != delta.data_ptr()


def test_rda_keeps_the_norm_of_orthogonal_contributions_where_avg_shrinks_it():
    deltas, weights = [3.0 * row for row in torch.eye(16)], [1 / 16] * 16
    assert l2_norm(rda(deltas, weights)) == pytest.approx(3.0)
    assert l2_norm(avg(deltas, weights)) == pytest.approx(3.0 / math.sqrt(16))


def test_rda_of_parallel_contributions_is_their_mean():
    (one,) = _vectors(1, 100)
    torch.testing.assert_close(rda([one, 3 * one], [0.5, 0.5]), 2 * one)


def test_rda_falls_back_to_avg_when_directions_cancel():
    one, zero = torch.tensor([4.0, 0.0]), torch.zeros(2)
    assert torch.equal(rda([one, -0.5 * one], [0.5, 0.5]), torch.tensor([1.0, 0.0]))
    almost = torch.tensor([-4.0, 4.0 * CANCEL_TOLERANCE])
    assert torch.equal(rda([one, almost], [0.5, 0.5]), avg([one, almost], [0.5, 0.5]))
    assert torch.equal(rda([zero, zero], [0.5, 0.5]), zero)


def test_zero_contribution_shortens_rda_and_does_not_turn_it():
    one, two, zero = torch.tensor([8.0, 0.0]), torch.tensor([0.0, 8.0]), torch.zeros(2)
    torch.testing.assert_close(rda([one, two, zero], [0.25, 0.25, 0.5]), 0.5 * rda([one, two], [0.5, 0.5]))
    assert torch.equal(rda([one, zero], [0.25, 0.75]), 0.25 * one)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_rda_survives_squares_outside_the_range_of_fp32(scale):
    deltas = [d * scale for d in torch.eye(4)]
    assert l2_norm(rda(deltas, [0.25] * 4)) / scale == pytest.approx(1.0)


@pytest.mark.parametrize("rule", [avg, rda])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_contribution_makes_the_merge_non_finite(rule, bad):
    deltas = _vectors(3, 50)
    deltas[1][7] = bad
    assert not torch.isfinite(rule(deltas, _weights(3))).all()


def test_merge_applies_each_segments_rule_to_its_part():
    deltas, weights = _vectors(3, 100), _weights(3)
    segments = [Segment(start=0, stop=40, rule="avg"), Segment(start=40, stop=100, rule="rda")]
    out = merge(deltas, weights, segments)
    assert torch.equal(out[:40], avg([d[:40] for d in deltas], weights))
    assert torch.equal(out[40:], rda([d[40:] for d in deltas], weights))


def test_reanchoring_adds_how_far_the_present_moved_from_the_base():
    delta, present, base = torch.tensor([1.0, 0.1]), torch.tensor([5.0, 2.0]), torch.tensor([3.0, 2.0])
    assert torch.equal(reanchor(delta, present, base), torch.tensor([3.0, 0.1]))
    assert torch.equal(reanchor(delta, base, base), delta)


# The fused form

SIZE = 3 * ROW + 501
CUTS = [
    _whole(SIZE, "avg"),
    _whole(SIZE, "rda"),
    [
        Segment(start=0, stop=77, rule="avg"),
        Segment(start=77, stop=2 * ROW + 400, rule="rda"),
        Segment(start=2 * ROW + 400, stop=SIZE, rule="rda"),
    ],
]


@pytest.mark.parametrize("outer", OUTERS, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("segments", CUTS, ids=["avg", "rda", "mixed"])
@pytest.mark.parametrize("num", [1, 2, 8])
def test_merge_and_step_equals_merge_then_update_bit_for_bit(num, segments, outer):
    theta, b, *deltas = _vectors(num + 2, SIZE)
    weights, state = _weights(num), dict.fromkeys(outer.init(theta), b)
    merged = merge(deltas, weights, segments)
    plain_theta, plain_state = outer.update(merged, theta, state)
    for block in (ROW, 2 * ROW, 64 * ROW):
        new_theta, new_state, result = _run(theta, deltas, weights, segments, outer, state, block=block)
        assert torch.equal(new_theta, plain_theta)
        assert all(torch.equal(new_state[name], plain_state[name]) for name in state)
        assert result.finite
        assert result.norm == pytest.approx(merged.double().norm().item(), rel=1e-5)


def test_merge_and_step_falls_back_like_the_plain_rule():
    one = _vectors(1, SIZE)[0]
    deltas, theta = [one, -0.5 * one], torch.zeros(SIZE)
    new_theta, _, result = _run(theta, deltas, [0.5, 0.5], _whole(SIZE, "rda"), Sgd(lr=1.0), {}, block=ROW)
    assert torch.equal(new_theta, -merge(deltas, [0.5, 0.5], _whole(SIZE, "rda")))
    assert result.norm == pytest.approx(l2_norm(0.25 * one), rel=1e-5)


@pytest.mark.parametrize("rule", ["avg", "rda"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("outer", OUTERS, ids=lambda o: type(o).__name__)
def test_merge_and_step_reports_what_is_not_finite_and_leaves_inputs_alone(outer, bad, rule):
    theta, *deltas = _vectors(4, SIZE)
    deltas[2][SIZE - 1] = bad
    state, before = outer.init(theta), theta.clone()
    result = _run(theta, deltas, _weights(3), _whole(SIZE, rule), outer, state)[2]
    assert not result.finite
    assert not math.isfinite(result.norm)
    assert torch.equal(theta, before)
    assert not any(value.any() for value in state.values())


def test_large_finite_parameters_are_not_mistaken_for_infinite_ones():
    theta = torch.full((100,), 3e38)
    result = _run(theta, [torch.ones(100)], [1.0], _whole(100, "avg"), Sgd(lr=1.0), {})[2]
    assert result.finite


def test_overflow_in_the_outer_step_is_reported():
    theta, delta = torch.zeros(10), torch.full((10,), 3e38)
    outer = Nesterov(lr=0.7)
    assert not _run(theta, [delta], [1.0], _whole(10, "avg"), outer, outer.init(theta))[2].finite


def test_merging_depends_neither_on_threads_nor_on_alignment():
    size = 20 * ROW + 3
    theta, b, *deltas = _vectors(6, size)
    shifted = [torch.empty(size + 1)[1:].copy_(d) for d in deltas]
    outer, before, outputs = Nesterov(lr=0.7), torch.get_num_threads(), []
    try:
        for threads, vectors in ((1, deltas), (2, deltas), (2, shifted)):
            torch.set_num_threads(threads)
            outputs.append(_run(theta, vectors, _weights(4), _whole(size, "rda"), outer, {"momentum": b})[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


# Norms


@given(size=st.integers(0, 3 * ROW), scale=st.sampled_from([1e-40, 1e-25, 1e-12, 1.0, 1e19, 1e35]))
@settings(deadline=None, max_examples=30)
def test_norm_is_right_at_every_size_and_scale(size, scale):
    x = _vectors(1, size)[0] * scale
    assert l2_norm(x) == pytest.approx(x.double().norm().item(), rel=1e-5)


def test_rows_of_blocks_are_the_rows_of_the_whole():
    (x,) = _vectors(1, 5 * ROW + 9)
    assert row_norms(x[: 2 * ROW]) + row_norms(x[2 * ROW : 3 * ROW]) + row_norms(x[3 * ROW :]) == row_norms(x)


# User mistakes


@pytest.mark.parametrize(
    ("deltas", "weights", "message"),
    [
        ([], [], "at least one"),
        ([torch.ones(2)], [0.5, 0.5], "same number"),
        ([torch.ones(2)], [0.5], "sum to 1"),
        ([torch.ones(2), torch.ones(2)], [2.0, -1.0], "non-negative"),
        ([torch.ones(2), torch.ones(2)], [math.nan, 1.0], "sum to 1"),
        ([torch.ones(2), torch.ones(3)], [0.5, 0.5], "one length"),
        ([torch.ones(2).double()], [1.0], "fp32"),
    ],
)
def test_contributions_that_do_not_fit_are_refused(deltas, weights, message):
    for rule in (avg, rda):
        with pytest.raises(ValueError, match=message):
            rule(deltas, weights)


@pytest.mark.parametrize("cut", [[(0, 2)], [(1, 4)], [(0, 2), (3, 4)], [(0, 3), (2, 4)], [(0, 5)], []])
def test_segments_must_tile_the_vector(cut):
    segments = [Segment(start=a, stop=b, rule="avg") for a, b in cut]
    with pytest.raises(ValueError, match="tile"):
        merge([torch.ones(4)], [1.0], segments)


def test_bad_segments_and_buffers_are_refused():
    with pytest.raises(ValueError, match="unknown"):
        Segment(start=0, stop=1, rule="mean")
    with pytest.raises(ValueError, match="start < stop"):
        Segment(start=1, stop=1, rule="avg")
    theta, delta, whole, sgd = torch.ones(4), torch.ones(4), _whole(4, "avg"), Sgd(lr=1.0)
    with pytest.raises(ValueError, match="shares memory"):
        merge_and_step(theta, [delta], [1.0], whole, sgd, {}, theta, {})
    with pytest.raises(ValueError, match="4 elements"):
        merge_and_step(theta, [delta], [1.0], whole, sgd, {}, torch.ones(5), {})
    with pytest.raises(ValueError, match="out_state"):
        merge_and_step(theta, [delta], [1.0], whole, sgd, {}, torch.ones(4), {"momentum": theta})
    with pytest.raises(ValueError, match="multiple"):
        merge_and_step(theta, [delta], [1.0], whole, sgd, {}, torch.ones(4), {}, block=100)
