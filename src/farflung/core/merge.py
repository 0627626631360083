"""Merge rules: many outer gradients become one, plainly or fused with the outer step.

Contributions come in sorted learner order, with weights that already sum to one; sums run in that order with
fp32 accumulators, so that every executor gets the same bits. Both forms use the same elementwise operations
and the same norms: `merge_and_step` equals `merge` followed by `Outer.update` bit for bit, for both rules.

Source: Decoupled DiLoCo (arXiv 2604.21428), section on merging. Legend: M contributions, N elements.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from farflung.core.norms import ROW, combine, l2_norm, norm_from_rows, row_norms
from farflung.core.outer import Outer, State

Rule = Literal["avg", "rda"]

CANCEL_TOLERANCE = 1e-4
"""`rda` falls back to `avg` when the averaged direction is shorter than this (relative to one contribution).

M orthogonal equal contributions average to a direction of length 1 / sqrt(M), so honest merges stay far above
it up to M = 1e8; at this length fp32 rounding (1e-7) already turns the direction by about 1e-3.
"""

BLOCK = 2**18
"""Elements per block of `merge_and_step`: 1 MiB of scratch. Smaller loses to the cost of starting an
operation (64 Ki: -20 %), larger gains little and leaves the cache of small machines."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Elements ``start:stop`` of a fragment are merged together by ``rule`` (RDA: one tensor, one direction).

    Args:
        start: first element, >= 0.
        stop: one past the last element, > start.
        rule: ``"avg"`` or ``"rda"``.

    Raises:
        ValueError: an empty or negative range, or an unknown rule.
    """

    start: int
    stop: int
    rule: Rule

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"segment {self.start}:{self.stop} must satisfy 0 <= start < stop")
        if self.rule not in ("avg", "rda"):
            raise ValueError(f"merge rule = {self.rule!r} is unknown (known: avg, rda)")


@dataclass(frozen=True, kw_only=True)
class MergeResult:
    """What a merge tells the machines, which never see tensors.

    Attributes:
        finite: every element of the new parameters is finite. As long as the old parameters and state were
            finite, so is the new state: whatever is not finite in it reaches the parameters in the same step.
        norm: Euclidean norm of the merged outer gradient; inf or NaN if that is not finite.
    """

    finite: bool
    norm: float


def avg(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Weighted mean ``sum_m w_m v_m``.

    Args:
        deltas: M >= 1 fp32 vectors of N elements, in sorted learner order.
        weights: M non-negative numbers with sum 1.

    Returns:
        A new fp32 vector of N elements. With M = 1 the input, bit for bit.

    Raises:
        ValueError: no contribution, or lengths or weights that do not fit.

    >>> avg([torch.tensor([4.0, 0.0]), torch.tensor([0.0, 8.0])], [0.25, 0.75])
    tensor([1., 6.])
    """
    _check(deltas, weights)
    return _weighted_sum(deltas, weights, torch.empty_like(deltas[0]))


def rda(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Radial-directional averaging: norm and direction are averaged apart.

    ``(sum_m w_m ||v_m||) phi(sum_m w_m phi(v_m))``, ``phi(x) = x / ||x||``, ``phi(0) = 0``

    Outer gradients of different learners are nearly orthogonal, so a plain mean shrinks like
    ``1 / sqrt(M)``; this keeps the norm whatever M is (the printed radial factor of arXiv 2604.21428 is a
    vector; read as the norm).

    * A zero contribution keeps its weight: it shortens the result and does not turn it.
    * At most one non-zero contribution (so also M = 1): equal to `avg`, and computed as that.
    * Directions that cancel to less than `CANCEL_TOLERANCE` times the weight of the non-zero contributions:
      `avg`, whose result is small there as it should be.
    * A non-finite contribution makes the result non-finite.

    Args:
        deltas: M >= 1 fp32 vectors of N elements, in sorted learner order.
        weights: M non-negative numbers with sum 1.

    Returns:
        A new fp32 vector of N elements. With M = 1 the input, bit for bit.

    Raises:
        ValueError: no contribution, or lengths or weights that do not fit.

    >>> rda([torch.tensor([10.0, 0.0]), torch.tensor([0.0, 10.0])], [0.5, 0.5])
    tensor([7.0711, 7.0711])
    """
    _check(deltas, weights)
    plan = _plan_rda(weights, [l2_norm(delta) for delta in deltas] if len(deltas) > 1 else [])
    if plan is None:
        return avg(deltas, weights)
    direction = _weighted_sum(deltas, plan.coefs, torch.empty_like(deltas[0]))
    length = l2_norm(direction)
    return direction.mul_(plan.radius / length) if length > plan.min_length else avg(deltas, weights)


def reanchor(delta: Tensor, present: Tensor, base: Tensor) -> Tensor:
    """Outer gradient against the present parameters, of a contribution made from an older base.

    ``Theta_present - theta = (Theta_present - Theta_base) + (Theta_base - theta)``

    Decoupled DiLoCo (arXiv 2604.21428, Algorithm 2) anchors at the syncer's own previous value, so stale work
    also pulls back toward its old base. Applied to the deltas before `merge`.

    Args:
        delta: ``Theta_base - theta``, fp32 vector.
        present: the syncer's parameters now.
        base: the version the delta was taken against.

    Returns:
        A new vector; equal to ``delta`` bit for bit when ``present`` and ``base`` are equal.

    >>> reanchor(torch.tensor([1.0]), present=torch.tensor([5.0]), base=torch.tensor([3.0]))
    tensor([3.])
    """
    return (present - base).add_(delta)


def merge(deltas: Sequence[Tensor], weights: Sequence[float], segments: Sequence[Segment]) -> Tensor:
    """Merge each segment of a fragment by its own rule.

    Args:
        deltas: M >= 1 fp32 vectors of N elements, in sorted learner order.
        weights: M non-negative numbers with sum 1.
        segments: in order, tiling ``0:N`` without gap or overlap.

    Returns:
        A new fp32 vector of N elements.

    Raises:
        ValueError: as `avg`, or segments that do not tile.

    >>> one, two = torch.tensor([4.0, 3.0, 0.0]), torch.tensor([2.0, 0.0, 3.0])
    >>> segments = [Segment(start=0, stop=1, rule="avg"), Segment(start=1, stop=3, rule="rda")]
    >>> merge([one, two], [0.5, 0.5], segments)
    tensor([3.0000, 2.1213, 2.1213])
    """
    _check(deltas, weights, segments)
    rules = {"avg": avg, "rda": rda}
    out = torch.empty_like(deltas[0])
    for seg in segments:
        out[seg.start : seg.stop] = rules[seg.rule]([d[seg.start : seg.stop] for d in deltas], weights)
    return out


def merge_and_step(
    theta: Tensor,
    deltas: Sequence[Tensor],
    weights: Sequence[float],
    segments: Sequence[Segment],
    outer: Outer,
    state: State,
    out_theta: Tensor,
    out_state: State,
    *,
    block: int = BLOCK,
) -> MergeResult:
    """``outer.update(merge(deltas, weights, segments), theta, state)``, block by block while hot in cache.

    Each contribution is read once (avg) or twice (rda: norms first), theta and state are read and written
    once; nothing is allocated but one block. For rda ``out_theta`` also holds the averaged direction until
    its length is known.

    Args:
        theta: fp32 vector of N elements, the present parameters.
        deltas, weights, segments: as for `merge`.
        outer: outer optimizer.
        state: its state for this fragment.
        out_theta: receives the new parameters; shares no memory with any input.
        out_state: receives the new state; ``state`` itself is allowed, but then a non-finite result can't be
            thrown away.
        block: elements per block, a positive multiple of `farflung.core.norms.ROW`; changes no bit.

    Returns:
        Whether the new parameters are finite, and the norm of the merged outer gradient.

    Raises:
        ValueError: as `merge`, or buffers that do not fit.

    >>> from farflung.core.outer import Sgd
    >>> new = torch.empty(2)
    >>> whole = [Segment(start=0, stop=2, rule="avg")]
    >>> merge_and_step(torch.ones(2), [torch.tensor([3.0, 4.0])], [1.0], whole, Sgd(lr=1.0), {}, new, {})
    MergeResult(finite=True, norm=5.0)
    >>> new
    tensor([-2., -3.])
    """
    _check(deltas, weights, segments)
    _check_buffers(theta, deltas, state, out_theta, out_state, block)
    scratch = torch.empty_like(theta[:block])
    finite, norms = True, []
    for seg in segments:
        part = slice(seg.start, seg.stop)
        job = _Job(
            theta=theta[part],
            deltas=[d[part] for d in deltas],
            weights=weights,
            outer=outer,
            state={name: value[part] for name, value in state.items()},
            out_theta=out_theta[part],
            out_state={name: value[part] for name, value in out_state.items()},
            scratch=scratch,
        )
        result = (_step_rda if seg.rule == "rda" else _step_avg)(job)
        finite &= result.finite
        norms.append(result.norm)
    return MergeResult(finite=finite, norm=combine(norms))


class _Job(NamedTuple):
    """The tensors of one segment; ``scratch`` holds one block."""

    theta: Tensor
    deltas: Sequence[Tensor]
    weights: Sequence[float]
    outer: Outer
    state: State
    out_theta: Tensor
    out_state: State
    scratch: Tensor

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Each block's place in the segment, and as much scratch as it needs."""
        size, block = self.theta.numel(), self.scratch.numel()
        for start in range(0, size, block):
            stop = min(start + block, size)
            yield slice(start, stop), self.scratch[: stop - start]


def _step_avg(job: _Job) -> MergeResult:
    finite, norms = True, []
    for at, merged in job.blocks():
        _weighted_sum([d[at] for d in job.deltas], job.weights, merged)
        norms.append(l2_norm(merged))
        finite &= _outer_step(job, at, merged)
    return MergeResult(finite=finite, norm=combine(norms))


def _step_rda(job: _Job) -> MergeResult:
    plan = _plan_rda(job.weights, [l2_norm(delta) for delta in job.deltas] if len(job.deltas) > 1 else [])
    if plan is None:
        return _step_avg(job)
    rows: list[float] = []
    for at, _ in job.blocks():
        rows += row_norms(_weighted_sum([d[at] for d in job.deltas], plan.coefs, job.out_theta[at]))
    length = norm_from_rows(rows, job.out_theta)
    if not length > plan.min_length:
        return _step_avg(job)
    finite = True
    for at, merged in job.blocks():
        torch.mul(job.out_theta[at], plan.radius / length, out=merged)
        finite &= _outer_step(job, at, merged)
    return MergeResult(finite=finite, norm=plan.radius)


def _outer_step(job: _Job, at: slice, merged: Tensor) -> bool:
    """Take the outer step for one block; is the result finite?"""
    new = job.out_theta[at]
    job.outer.update_into(
        merged,
        job.theta[at],
        {name: value[at] for name, value in job.state.items()},
        new,
        {name: value[at] for name, value in job.out_state.items()},
    )
    # A sum is cheaper than isfinite, but finite elements can overflow it: only then look closely.
    return math.isfinite(new.sum()) or bool(torch.isfinite(new).all())


class _RdaPlan(NamedTuple):
    """``sum_m coefs_m v_m`` is the averaged direction, to be given length ``radius``."""

    coefs: list[float]
    radius: float
    min_length: float


def _plan_rda(weights: Sequence[float], norms: Sequence[float]) -> _RdaPlan | None:
    """None when at most one contribution is non-zero (or only one came): RDA is then Avg."""
    if sum(norm != 0.0 for norm in norms) <= 1:
        return None
    return _RdaPlan(
        coefs=[w / norm if norm else 0.0 for w, norm in zip(weights, norms, strict=True)],
        radius=math.fsum(w * norm for w, norm in zip(weights, norms, strict=True)),
        min_length=CANCEL_TOLERANCE * math.fsum(w for w, norm in zip(weights, norms, strict=True) if norm),
    )


def _weighted_sum(vectors: Sequence[Tensor], coefs: Sequence[float], out: Tensor) -> Tensor:
    """``sum_m c_m v_m`` in the given order, with an fp32 accumulator."""
    torch.mul(vectors[0], coefs[0], out=out)
    for vector, coef in zip(vectors[1:], coefs[1:], strict=True):
        out.add_(vector, alpha=coef)
    return out


def _check(
    deltas: Sequence[Tensor], weights: Sequence[float], segments: Sequence[Segment] | None = None
) -> None:
    if not deltas or len(deltas) != len(weights):
        raise ValueError(
            f"{len(deltas)} deltas and {len(weights)} weights: need the same number, at least one"
        )
    if not (min(weights) >= 0.0 and abs(math.fsum(weights) - 1.0) <= 1e-6):
        raise ValueError(f"weights {list(weights)} must be non-negative and sum to 1")
    if any(d.shape != deltas[0].shape or d.dtype != torch.float32 or d.dim() != 1 for d in deltas):
        raise ValueError("deltas must be fp32 vectors of one length")
    if segments is not None:
        _check_tiling(segments, deltas[0].numel())


def _check_tiling(segments: Sequence[Segment], size: int) -> None:
    edge = 0
    for seg in segments:
        if seg.start != edge:
            raise ValueError(f"segments must tile 0:{size}, but {seg} does not start at {edge}")
        edge = seg.stop
    if edge != size:
        raise ValueError(f"segments must tile 0:{size}, but they end at {edge}")


def _check_buffers(
    theta: Tensor, deltas: Sequence[Tensor], state: State, out_theta: Tensor, out_state: State, block: int
) -> None:
    if block <= 0 or block % ROW:
        raise ValueError(f"block = {block} must be a positive multiple of {ROW}")
    if state.keys() != out_state.keys():
        raise ValueError(f"out_state has {sorted(out_state)}, state has {sorted(state)}")
    vectors = [theta, out_theta, *state.values(), *out_state.values()]
    if any(v.shape != deltas[0].shape or v.dtype != torch.float32 for v in vectors):
        raise ValueError(
            f"theta, state and their outputs must be fp32 vectors of {deltas[0].numel()} elements"
        )
    if out_theta.numel() and any(
        out_theta.data_ptr() == v.data_ptr() for v in [theta, *deltas, *state.values()]
    ):
        raise ValueError("out_theta shares memory with an input")
