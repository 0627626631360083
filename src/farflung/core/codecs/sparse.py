"""Sparse codecs: transform chunks, choose coefficients, send their values and their positions.

    encode   vector -> chunks -> T -> choose k of B -> values by a dense codec, positions by an index format
    decode   zeros, the coefficients put at their places -> T^-1 -> vector

Payload: for each group of chunks (see `chunks`) the values' payload, then the positions'; last, where positions
are drawn, the draw's number in eight bytes. Sizes depend on the codec and the number of elements alone.

A chunk travels whole where that takes no more bits than k coefficients with their positions. A chunk that
holds NaN or infinity decodes to something that is not finite, with a DCT throughout; the dense codec may spread
that over its block of values. Nothing is kept between calls: what is not sent comes later, by error feedback
(see `feedback`). Legend: K chunks of B coefficients, k sent of each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor

from farflung.core.codecs.base import Codec, check_payload, payload_for, room_for, vector_for
from farflung.core.codecs.chunks import Group, flat_groups, tensor_groups
from farflung.core.codecs.coefficients import Coefficients
from farflung.core.codecs.dct import SIDE
from farflung.core.codecs.dense import dense_name
from farflung.core.codecs.indices import INDICES, IndexFormat
from farflung.core.codecs.select import drawn, top_k
from farflung.errors import did_you_mean

Select = Literal["top", "random", "rows", "all"]
SELECTIONS: tuple[Select, ...] = ("top", "random", "rows", "all")

CHUNK = SIDE * SIDE
"""Elements of a chunk unless the name says another number (DeMo, SparseLoCo, arXiv 2510.03371: 64 x 64)."""

MAX_CHUNK = 2**16
_COUNTER_BYTES = 8


class _Section(NamedTuple):
    """Where a group's values and positions lie in the payload, and its first coefficient among all."""

    group: Group
    values: slice
    indices: slice
    first: int


@final
@dataclass(frozen=True, kw_only=True)
class SparseCodec:
    """k coefficients of every chunk, by a choice of transform, selection, value format and index format.

    ``top`` takes the largest magnitudes; of equal ones the first. ``random`` takes k that seed and counter
    draw, the same in all chunks of a size, so that no positions travel and payloads of one draw sum like
    plain vectors; ``rows`` does so with whole rows of `SIDE` elements. Every ``ceil(B / k)`` draws send each
    coefficient. ``all`` sends every coefficient each time.

    Args:
        values: dense codec of the chosen values; its block says how many share statistics.
        select: which coefficients.
        k: coefficients of a chunk, 1 to ``chunk``; a multiple of `SIDE` for ``rows``, 0 for ``all``.
        dct: choose among the coefficients of the DCT of each chunk (64 columns), not among elements.
        chunk: elements of a chunk, a power of two from 8; up to 4096 with a DCT or 12-bit positions.
        indices: a name in `INDICES` for ``top``, else None.
        seed, counter: of the draw, at least 0. The counter travels: a decoder needs only the seed.
        tensors: cut along tensors (`chunks.tensor_chunks`), whose shapes `for_shapes` gives.
        shapes: of the tensors that the vector holds, in order.

    Raises:
        ValueError: a field is out of range, or two contradict each other.

    >>> from farflung.core.codecs import get_codec
    >>> codec = get_codec("dct-top32-int8-12bit")
    >>> codec.size_bytes(4096 * 8)  # 256 values with one scale, 256 positions
    644
    >>> x = torch.linspace(-1, 1, 4096)
    >>> bool((codec.decode(codec.encode(x), 4096) - x).abs().max() < 0.05)
    True
    """

    values: Codec
    select: Select = "top"
    k: int = 0
    dct: bool = False
    chunk: int = CHUNK
    indices: str | None = None
    seed: int = 0
    counter: int = 0
    tensors: bool = False
    shapes: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ValueError(problem)

    @property
    def name(self) -> str:
        """The name from which `farflung.core.codecs.get_codec` makes this codec, but for counter and shapes."""
        parts = {
            "dct": self.dct,
            f"{self.select}{self.k or ''}": True,
            dense_name(self.values): True,
            f"{self.indices}": self.indices is not None,
            f"chunk{self.chunk}": self.chunk != CHUNK,
            f"seed{self.seed}": self.seed != 0,
            "tensors": self.tensors,
        }
        return "-".join(part for part, said in parts.items() if said)

    # ---- what is known before --------------------------------------------------------------------------

    def at(self, counter: int) -> "SparseCodec":
        """This codec for the ``counter``-th draw: the round's number. Only ``random`` and ``rows`` heed it."""
        return replace(self, counter=counter)

    def for_shapes(self, shapes: Sequence[Sequence[int]]) -> "SparseCodec":
        """This codec for a vector that holds tensors of these shapes (see `chunks.piece_shapes`)."""
        return replace(self, shapes=tuple(map(tuple, shapes)))

    def size_bytes(self, num_elements: int) -> int:
        """For each group ``values.size_bytes(K k)`` and, for ``top``, ``indices.size_bytes(K, k, B)``.

        Without statistics of values, b-bit values and 12-bit positions are ``K k (12 + b) / 8``.

        Raises:
            ValueError: the shapes hold another number of elements, or are not known.
        """
        end = max((section.indices.stop for section in self._sections(num_elements)), default=0)
        return end + _COUNTER_BYTES * self._draws

    def num_coefficients(self, num_elements: int) -> int:
        """Places of coefficients; more than elements where the last chunk is padded."""
        return sum(group.num * group.size for group in self._groups(num_elements))

    def num_sent(self, num_elements: int) -> int:
        """Coefficients in a payload: over `num_coefficients` it is the density, which rounds multiply."""
        return sum(group.num * group.k for group in self._groups(num_elements))

    # ---- codec -----------------------------------------------------------------------------------------

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Codec.encode`."""
        payload = payload_for(x, self.size_bytes(x.numel()), out)
        for section in self._sections(x.numel()):
            value_V, index_Kk = self._chosen(x, section.group)
            self.values.encode(value_V, out=payload[section.values])
            if index_Kk is not None:
                payload[section.indices] = _format(self).encode(index_Kk, section.group.size)
        if self._draws:
            payload[-_COUNTER_BYTES:] = torch.tensor(list(self.counter.to_bytes(_COUNTER_BYTES, "little")))
        return payload

    def decode(self, payload: Tensor, num_elements: int, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`; also refuses positions that no encoder writes (``out`` is then arbitrary)."""
        y = vector_for(payload, self.size_bytes(num_elements), num_elements, out)
        for section in self._sections(num_elements):
            group, raw = section.group, payload[section.values]
            if group.is_plain:
                self.values.decode(raw, group.stop - group.start, out=y[group.start : group.stop])
            else:
                value_Kk, index_Kk = self._received(payload, section)
                for at, coef_nB in group.restored(y):
                    coef_nB.scatter_(1, index_Kk[at], value_Kk[at])
        return y

    # ---- its halves ------------------------------------------------------------------------------------

    def coefficients(self, payload: Tensor, num_elements: int) -> Coefficients:
        """What a payload carries, without the inverse transform: payloads are summed without dense vectors.

        Raises:
            ValueError: as `decode`.
        """
        check_payload(payload, self.size_bytes(num_elements))
        places = [torch.empty(0, dtype=torch.int64, device=payload.device)]
        values = [torch.empty(0, device=payload.device)]
        for section in self._sections(num_elements):
            value_Kk, index_Kk = self._received(payload, section)
            chunk_K1 = torch.arange(section.group.num, device=payload.device)[:, None]
            places.append((index_Kk + chunk_K1 * section.group.size + section.first).flatten())
            values.append(value_Kk.flatten())
        return Coefficients(torch.cat(places), torch.cat(values))

    def restore(self, coefficients: Coefficients, num_elements: int, out: Tensor | None = None) -> Tensor:
        """The fp32 vector with these coefficients and zeros elsewhere: the second half of `decode`.

        Raises:
            ValueError: a place beyond `num_coefficients`, or ``out`` does not fit.
        """
        place, value = coefficients
        total = self.num_coefficients(num_elements)
        if place.numel() and not (place[0] >= 0 and place[-1] < total):
            raise ValueError(f"coefficients: place {int(place[-1])}, must be from 0 to {total - 1}")
        y = room_for(num_elements, place.device, out)
        for group, _, _, first in self._sections(num_elements):
            for at, coef_nB in group.restored(y):
                start = first + at.start * group.size
                edges = torch.tensor([start, start + coef_nB.numel()], device=place.device)
                here = slice(*torch.searchsorted(place, edges).tolist())
                coef_nB.view(-1)[place[here] - start] = value[here]
        return y

    # ---- inside ----------------------------------------------------------------------------------------

    @property
    def _draws(self) -> bool:
        return self.select in ("random", "rows")

    def _groups(self, num_elements: int) -> list[Group]:
        if not self.tensors:
            return flat_groups(num_elements, self.chunk, self.dct, self.select == "rows", self._k_of)
        if self.shapes is None:
            raise ValueError(f"codec {self.name!r} needs the shapes of the tensors: for_shapes")
        groups = tensor_groups(self.shapes, self.dct, self._k_of)
        held = groups[-1].stop if groups else 0
        if held != num_elements:
            raise ValueError(f"codec {self.name!r}: the shapes hold {held} elements, not {num_elements}")
        return groups

    def _k_of(self, size: int) -> int:
        """How many of so many elements travel: all, where that takes no more bits."""
        if self.select == "all" or self.k >= size:
            return size
        value_bits = self.values.size_bytes(2**18) * 8 / 2**18
        index_bits = 8 * _format(self).size_bytes(1, self.k, size) if self.indices else 0
        return size if size * value_bits <= self.k * value_bits + index_bits else self.k

    def _sections(self, num_elements: int) -> Iterator[_Section]:
        byte = first = 0
        for group in self._groups(num_elements):
            middle = byte + self.values.size_bytes(group.num * group.k)
            end = middle
            if self.indices and group.k < group.size:
                end += _format(self).size_bytes(group.num, group.k, group.size)
            yield _Section(group, slice(byte, middle), slice(middle, end), first)
            byte, first = end, first + group.num * group.size

    def _chosen(self, x: Tensor, group: Group) -> tuple[Tensor, Tensor | None]:
        """Values of all chunks in one vector, and the positions ``[K, k]`` if they travel."""
        if group.is_plain:
            return x[group.start : group.stop], None
        value_Kk = x.new_empty(group.num, group.k)
        travels = self.select == "top" and group.k < group.size
        index_Kk = x.new_empty(group.num, group.k, dtype=torch.int32) if travels else None
        fixed_k = None if travels else self._fixed(group, self.counter, x.device)
        for at, coef_nB in group.coefficients(x):
            if index_Kk is not None:
                index_nk = top_k(coef_nB, group.k)
                index_Kk[at], value_Kk[at] = index_nk, coef_nB.gather(1, index_nk)
            else:
                value_Kk[at] = coef_nB[:, fixed_k]
                value_Kk[at][~torch.isfinite(coef_nB.abs().amax(1))] = torch.nan  # never hide one
        return value_Kk.flatten(), index_Kk

    def _received(self, payload: Tensor, section: _Section) -> tuple[Tensor, Tensor]:
        """Values and positions ``[K, k]``."""
        group = section.group
        value_V = self.values.decode(payload[section.values], group.num * group.k)
        if self.indices and group.k < group.size:
            index_Kk = _format(self).decode(payload[section.indices], group.num, group.k, group.size)
        else:
            sent = bytes(payload[-_COUNTER_BYTES:].tolist()) if self._draws else b""
            fixed_k = self._fixed(group, int.from_bytes(sent, "little"), payload.device)
            index_Kk = fixed_k.expand(group.num, group.k)
        return value_V.view(group.num, group.k), index_Kk

    def _fixed(self, group: Group, counter: int, device: torch.device) -> Tensor:
        """Positions that all chunks of a group share, int64 ``[k]``."""
        if group.k == group.size:
            return torch.arange(group.k, device=device)
        unit = SIDE if self.select == "rows" else 1
        units = drawn(group.size // unit, group.k // unit, self.seed, counter)
        first_U1 = torch.tensor(units, device=device)[:, None] * unit
        return (first_U1 + torch.arange(unit, device=device)).flatten()


def _format(codec: SparseCodec) -> IndexFormat:
    return INDICES[codec.indices or ""]


def _problems(codec: SparseCodec) -> Iterator[str]:
    """What is wrong with a codec's fields, the first one first."""
    chunk, select, most = codec.chunk, codec.select, CHUNK if codec.dct else MAX_CHUNK
    if select not in SELECTIONS:
        yield f"select = {select!r} is unknown{did_you_mean(select, SELECTIONS)}"
    if not (8 <= chunk <= most and chunk & (chunk - 1) == 0):
        yield f"chunk = {chunk} must be a power of two from 8 to {most}{' with dct' if codec.dct else ''}"
    if select == "all" and codec.k:
        yield f"k = {codec.k} has no effect with select = 'all'"
    if select != "all" and not 1 <= codec.k <= chunk:
        yield f"k = {codec.k} must be from 1 to {chunk}, the elements of a chunk"
    if select == "rows" and (codec.dct or codec.tensors or codec.k % SIDE):
        yield f"rows{codec.k}: rows are of {SIDE} elements, of flat chunks without dct"
    if select == "top" and codec.indices not in INDICES:
        yield f"indices = {codec.indices!r} is unknown{did_you_mean(str(codec.indices), INDICES)}"
    if select != "top" and codec.indices is not None:
        yield f"indices = {codec.indices!r} has no effect with select = {select!r}"
    if codec.indices == "12bit" and chunk > CHUNK:
        yield f"indices = '12bit' reach {CHUNK} elements, chunk = {chunk} needs 'u16' or 'gaps'"
    if not 0 <= codec.seed < 2**64:
        yield f"seed = {codec.seed} must be from 0 to 2^64 - 1"
    if not 0 <= codec.counter < 2**64:
        yield f"counter = {codec.counter} must be from 0 to 2^64 - 1"
    if codec.seed and select not in ("random", "rows"):
        yield f"seed = {codec.seed} has no effect with select = {select!r}"
    if codec.tensors and chunk != CHUNK:
        yield f"chunk = {chunk} has no effect along tensors"
    if codec.shapes is not None and not codec.tensors:
        yield "shapes have no effect without tensors = True"
