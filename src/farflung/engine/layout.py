"""Where parameters, buffers and counters lie in the bytes of a fragment: raw, little-endian, no header.

    value    fp32 parameters | fp32 buffers | int64 counters      what the hub serves and a seed uploads
    payload  codec(payload)  | fp32 buffers | int64 counters      what a contribution uploads

Every section that is not empty starts at a multiple of `farflung.units.ALIGN_BYTES`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from farflung.core.codecs import Codec, SparseCodec
from farflung.core.codecs.chunks import piece_shapes
from farflung.core.fragments import Fragment, FragmentPlan, TensorSpec
from farflung.methods import Method
from farflung.units import packed_starts

_FP32_BYTES = 4
_COUNTER_BYTES = 8

Raw = bytes | bytearray | memoryview | Tensor
"""Bytes as they come: a uint8 vector, or anything that offers them."""


class Sections(NamedTuple):
    """The three parts of some bytes, as uint8 views of them."""

    params: Tensor
    buffers: Tensor
    counters: Tensor


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the three sections in bytes.

    >>> Layout(params=12, buffers=8, counters=0).size_bytes
    72
    """

    params: int
    buffers: int
    counters: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all sections and the gaps between them."""
        return self._starts()[3]

    def split(self, raw: Tensor) -> Sections:
        """Views of the sections.

        Args:
            raw: contiguous uint8 vector ``[size_bytes]``.

        Raises:
            ValueError: another size or dtype.
        """
        if raw.dtype != torch.uint8 or tuple(raw.shape) != (self.size_bytes,) or not raw.is_contiguous():
            raise ValueError(f"{raw.dtype} {list(raw.shape)} given, need {self.size_bytes} bytes")
        starts = self._starts()
        sizes = (self.params, self.buffers, self.counters)
        return Sections(*(raw[at : at + size] for at, size in zip(starts, sizes, strict=False)))

    def _starts(self) -> list[int]:
        """Start of each section, and the end of the last."""
        return packed_starts(self.params, self.buffers, self.counters)


def value_layout(fragment: Fragment) -> Layout:
    """Layout of a fragment's value."""
    return _with_riders(fragment, _FP32_BYTES * fragment.num_elements)


def codec_of(fragment: Fragment, codec: Codec, tensors: Sequence[TensorSpec], num_vectors: int = 1) -> Codec:
    """The codec as this fragment needs it: one that cuts along tensors is told what shapes they have."""
    if isinstance(codec, SparseCodec) and codec.tensors:
        return codec.for_shapes(piece_shapes(fragment.pieces, tensors) * num_vectors)
    return codec


def in_round(codec: Codec, round: int) -> Codec:
    """The codec as it encodes in this round: one that draws what it sends draws anew, the same at all learners."""
    return codec.at(round) if isinstance(codec, SparseCodec) else codec


def payload_layout(fragment: Fragment, codec: Codec, num_vectors: int = 1) -> Layout:
    """Layout of a contribution packed by ``codec``, which is the fragment's (`codec_of`)."""
    return _with_riders(fragment, codec.size_bytes(num_vectors * fragment.num_elements))


def payload_layouts(plan: FragmentPlan, method: Method) -> tuple[Layout, ...]:
    """Gossip: layouts of an offered vector, of a usual round and (where there are such) of a dense one."""
    (fragment,) = plan.fragments
    kinds = [method] if method.dense is None else [method, method.dense]
    codecs = [codec_of(fragment, kind.codec, plan.tensors, kind.num_vectors) for kind in kinds]
    return tuple(payload_layout(fragment, c, k.num_vectors) for c, k in zip(codecs, kinds, strict=True))


def as_bytes(raw: Raw) -> Tensor:
    """A uint8 vector over these bytes: a view where they are writable, else a copy (PyTorch's rule)."""
    if isinstance(raw, Tensor):
        return raw
    view = memoryview(raw).cast("B")
    if not len(view):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def put(section: Tensor, values: Tensor) -> None:
    """Write values into a section as they are in memory; the section may lie at any address."""
    section.copy_(values.contiguous().view(torch.uint8))


def _with_riders(fragment: Fragment, params: int) -> Layout:
    return Layout(
        params=params,
        buffers=_FP32_BYTES * fragment.num_buffer_elements,
        counters=_COUNTER_BYTES * fragment.num_counters,
    )
