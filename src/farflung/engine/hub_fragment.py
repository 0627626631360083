"""One fragment at the hub: the versions kept, the outer state, and contributions that wait for a merge."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from farflung.core.codecs.base import strips
from farflung.core.fragments import Fragment, TensorSpec
from farflung.core.merge import MergeResult, Rule, Segment, avg, merge_and_step, reanchor
from farflung.core.norms import l2_norm
from farflung.core.outer import Sgd
from farflung.engine.buffers import Buffer, Pool, digest
from farflung.engine.increments import IncrementLog, Increments
from farflung.engine.layout import Raw, as_bytes, codec_of, payload_layout, put, value_layout
from farflung.methods import Method
from farflung.protocol.actions import Merge

FINAL_OUTER = Sgd(lr=1.0)
"""The final merge is a plain weighted average: Theta - 1 * sum_m w_m (Theta - theta_m)."""


class Received(NamedTuple):
    """What the hub found in some bytes. `norm`: Euclidean, of parameters or payload; None if not finite."""

    finite: bool
    norm: float | None


class Merged(NamedTuple):
    """What a merge did. `norm`: of the outer gradient applied, 0 if none was; `digest`: of the parameters."""

    version: int
    finite: bool
    norm: float
    digest: str


class Value(NamedTuple):
    """A buffer in `value_layout`, and typed views of it: of a version, or of a decoded contribution."""

    buffer: Buffer
    params: Tensor  # fp32 [N]
    buffers: Tensor  # fp32 [B]
    counters: Tensor  # int64 [C]


class HubFragment:
    """State of one fragment.

    What `begin` returns may run in one thread while another receives, discards, retires and reads: that
    touches other buffers and other entries. Two merges of one fragment must not overlap.
    """

    def __init__(self, fragment: Fragment, method: Method, tensors: Sequence[TensorSpec]) -> None:
        self.fragment = fragment
        self.value_layout = value_layout(fragment)
        self.codec = codec_of(fragment, method.codec, tensors)
        self.payload_layout = payload_layout(fragment, self.codec)
        self.versions: dict[int, Value] = {}
        self.newest = -1
        self.outer_state: dict[str, Buffer] = {}
        self._method = method
        self._pool = Pool()
        downlink = method.downlink
        self.increments = (
            None if downlink is None else IncrementLog(Increments(fragment, downlink, tensors), self._pool)
        )
        self._waiting: dict[str, Value] = {}
        policy = method.policy
        self._segments = _segments(fragment, policy.merge, policy.merge_embedding)
        self._final_segments = _segments(fragment, "avg", "avg")

    # ---- values ----------------------------------------------------------------------------------------

    def blank(self) -> Value:
        """Room for a value, with arbitrary content."""
        buffer = self._pool.take(self.value_layout.size_bytes)
        params, buffers, counters = self.value_layout.split(buffer.raw)
        return Value(
            buffer, params.view(torch.float32), buffers.view(torch.float32), counters.view(torch.int64)
        )

    def install(self, version: int, value: Value) -> None:
        """Make a value the newest version."""
        self.versions[version] = value
        self.newest = version

    def seed(self, raw: Raw) -> Received:
        """Make these bytes version 0, in place of whatever is held."""
        value, given = self.blank(), as_bytes(raw)
        self.value_layout.split(given)
        value.buffer.raw.copy_(given)
        for version in list(self.versions):
            self.retire(version)
        self.install(0, value)
        if self.increments is not None:
            self.increments.clear()
        for state in self.outer_state.values():
            self._pool.give(state)
        self.outer_state = {
            name: self._copied(t) for name, t in self._method.outer.init(value.params).items()
        }
        return _received(value)

    def retire(self, version: int) -> None:
        """Forget a version; a reader that still has its bytes keeps them."""
        value = self.versions.pop(version, None)
        if value is not None:
            self._pool.give(value.buffer)
        if self.increments is not None:
            self.increments.retire(version)

    # ---- contributions ---------------------------------------------------------------------------------

    def receive(self, name: str, raw: Raw) -> Received:
        """Decode a contribution and keep it until `merge` or `discard`; a repeat replaces it."""
        payload, buffers, counters = self.payload_layout.split(as_bytes(raw))
        value = self.blank()
        self.codec.decode(payload, self.fragment.num_elements, out=value.params)
        put(value.buffers.view(torch.uint8), buffers)
        put(value.counters.view(torch.uint8), counters)
        self.discard(name)
        self._waiting[name] = value
        return _received(value)

    def discard(self, name: str) -> None:
        """Free a contribution; unknown names are fine."""
        value = self._waiting.pop(name, None)
        if value is not None:
            self._pool.give(value.buffer)

    # ---- merge -----------------------------------------------------------------------------------------

    def begin(self, action: Merge) -> Callable[[], Merged]:
        """Take hold of what a merge needs; the result does the work and commits."""
        parts = [self._waiting.pop(part.object) for part in action.parts]
        bases = [self.versions[part.base_version] for part in action.parts]
        present = self.versions[self.newest]
        pins = [value.buffer.lend() for value in (present, *bases)]  # retired meanwhile, they are not reused
        return partial(self._merge, action, present, list(zip(parts, bases, strict=True)), pins)

    def _merge(
        self, action: Merge, present: Value, work: list[tuple[Value, Value]], pins: Sequence[object]
    ) -> Merged:
        """Write the next version into a new buffer; commit it if it is finite, else a copy of the present."""
        plain = action.final and self._method.policy.final == "average"
        old = {} if plain else self.outer_state
        new, spare = self.blank(), {name: self._pool.take(b.raw.numel()) for name, b in old.items()}
        result = MergeResult(finite=True, norm=0.0)
        if work:
            result = self._merge_into(new, spare, action, present, work, plain)
        if work and result.finite and self.increments is not None and not action.final:
            finite = self.increments.advance(
                action.version, present.params, new.params, new.buffers, new.counters
            )
            result = MergeResult(finite=finite, norm=result.norm)
        stepped = bool(work) and result.finite
        if not stepped:
            new.buffer.raw.copy_(present.buffer.raw)
        if stepped and not plain:
            self.outer_state, spare = spare, old
        self.install(action.version, new)
        for buffer in (*spare.values(), *(part.buffer for part, _ in work)):
            self._pool.give(buffer)
        norm = result.norm if result.finite else 0.0
        return Merged(action.version, result.finite, norm, digest(new.params))

    def _merge_into(
        self,
        new: Value,
        spare: dict[str, Buffer],
        action: Merge,
        present: Value,
        work: list[tuple[Value, Value]],
        plain: bool,
    ) -> MergeResult:
        """Parameters by the outer step, outer state into ``spare``, buffers and counters by their rules."""
        parts, weights = [part for part, _ in work], [part.weight for part in action.parts]
        for given, asked in zip(parts, action.parts, strict=True):
            if asked.scale is not None:
                given.params.mul_(asked.scale)
        if self._method.policy.anchor == "present":
            for part, base in work:
                _reanchor(part.params, present, base)
        result = merge_and_step(
            present.params,
            [part.params for part in parts],
            weights,
            self._final_segments if plain else self._segments,
            FINAL_OUTER if plain else self._method.outer,
            {} if plain else _views(self.outer_state),
            new.params,
            _views(spare),
        )
        riders_finite = _merge_riders(new, present, parts, weights)
        return MergeResult(finite=result.finite and riders_finite, norm=result.norm)

    def _copied(self, values: Tensor) -> Buffer:
        buffer = self._pool.take(values.numel() * values.itemsize)
        put(buffer.raw, values)
        return buffer

    # ---- checkpoint ------------------------------------------------------------------------------------

    def restore(
        self, versions: dict[int, dict[str, Tensor]], outer_state: dict[str, Tensor], unsent: Tensor | None
    ) -> None:
        """Replace everything by what a checkpoint holds; contributions and increments are not part of one."""
        for version in list(self.versions):
            self.retire(version)
        if self.increments is not None:
            self.increments.clear()
            self.increments.unsent = None if unsent is None else unsent.clone()
        for version, sections in sorted(versions.items()):
            value = self.blank()
            for name, target in (
                ("params", value.params),
                ("buffers", value.buffers),
                ("counters", value.counters),
            ):
                if target.numel():
                    target.copy_(sections[name])
            self.install(version, value)
        self.outer_state = {name: self._copied(values) for name, values in outer_state.items()}


def _segments(fragment: Fragment, merge: str, merge_embedding: str) -> list[Segment]:
    """One segment a piece: RDA keeps one direction a tensor (the paper does not publish its granularity)."""
    rules: dict[bool, Rule] = {True: _rule(merge_embedding), False: _rule(merge)}
    return [
        Segment(start=piece.offset, stop=piece.offset + piece.length, rule=rules[piece.embedding])
        for piece in fragment.pieces
    ]


def _reanchor(delta: Tensor, present: Value, base: Value) -> None:
    """``delta + (Theta_present - Theta_base)`` in place, in strips that stay in cache."""
    if base is not present:
        for at in strips(delta.numel()):
            delta[at] = reanchor(delta[at], present.params[at], base.params[at])


def _rule(name: str) -> Rule:
    if name == "avg":
        return "avg"
    if name == "rda":
        return "rda"
    raise ValueError(f"merge rule = {name!r} is unknown (known: avg, rda)")


def _views(buffers: dict[str, Buffer]) -> dict[str, Tensor]:
    return {name: buffer.raw.view(torch.float32) for name, buffer in buffers.items()}


def _received(value: Value) -> Received:
    norm = l2_norm(value.params)
    finite = math.isfinite(norm) and bool(torch.isfinite(value.buffers).all())
    return Received(finite, norm if math.isfinite(norm) else None)


def _merge_riders(new: Value, present: Value, parts: Sequence[Value], weights: Sequence[float]) -> bool:
    """Buffers: fp32 weighted mean; counters: maximum over parts and present. Are the buffers finite?"""
    if new.buffers.numel():
        new.buffers.copy_(avg([part.buffers for part in parts], weights))
    new.counters.copy_(present.counters)
    for part in parts:
        torch.maximum(new.counters, part.counters, out=new.counters)
    return bool(torch.isfinite(new.buffers).all())
