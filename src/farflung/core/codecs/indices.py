"""How the positions of sent coefficients travel: in a fixed number of bits, or as gaps. Sizes are known before.

Each format takes sorted positions ``[K, k]`` below B, and refuses what is not that when it decodes: a payload
comes from elsewhere. Legend: K chunks of B coefficients, k sent of each.
"""

from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from farflung.core.codecs.bits import num_bytes, packed, packed_numbers, unpacked, unpacked_numbers


class IndexFormat(Protocol):
    """Positions <-> bytes."""

    def size_bytes(self, num: int, k: int, size: int) -> int:
        """Bytes of k positions below ``size`` in each of ``num`` chunks."""
        ...

    def encode(self, index_Kk: Tensor, size: int) -> Tensor:
        """uint8 vector of `size_bytes`; positions as int32."""
        ...

    def decode(self, raw: Tensor, num: int, k: int, size: int) -> Tensor:
        """Positions, int64 ``[num, k]``.

        Raises:
            ValueError: they do not increase, or one is not below ``size``.
        """
        ...


@final
@dataclass(frozen=True, kw_only=True)
class FixedWidth:
    """Every position in ``bits`` bits, one after another.

    >>> FixedWidth(bits=12).size_bytes(1, 64, 4096)
    96
    """

    bits: int

    def size_bytes(self, num: int, k: int, size: int) -> int:
        """``ceil(K k bits / 8)``."""
        return num_bytes(num * k, self.bits)

    def encode(self, index_Kk: Tensor, size: int) -> Tensor:
        """See `IndexFormat.encode`."""
        return packed_numbers(index_Kk.flatten(), self.bits)

    def decode(self, raw: Tensor, num: int, k: int, size: int) -> Tensor:
        """See `IndexFormat.decode`."""
        return _checked(unpacked_numbers(raw, self.bits, num * k).view(num, k).long(), size)


@final
@dataclass(frozen=True, kw_only=True)
class Gaps:
    """Elias-Fano: l low bits of every position as they are, the rest as gaps in unary. Fixed size, near the bound.

    The upper parts ``position >> l`` of a chunk are a row of ``k + ((B - 1) >> l)`` bits in which the i-th
    position sets bit ``(position >> l) + i``: how many zeros lie before a one says where it is. So the size
    depends on K, k and B alone. A Golomb-Rice code has the same worst case, but then a size that is not known
    before; its mean is 6 % smaller (7.52 bits at 64 of 4096). l is the best one, about ``log2(B / k)``.

    7.99 bits a position at 64 of 4096 (12 without coding; log2 of the binomial, the bound, is 7.36), 8.97 at
    32 of 4096 (bound 8.32).

    >>> Gaps().size_bytes(8, 64, 4096) / (8 * 64) * 8
    7.984375
    """

    def size_bytes(self, num: int, k: int, size: int) -> int:
        """``ceil(K k l / 8) + ceil(K (k + ((B - 1) >> l)) / 8)``."""
        return sum(self._parts(num, k, size))

    def encode(self, index_Kk: Tensor, size: int) -> Tensor:
        """See `IndexFormat.encode`."""
        num, k = index_Kk.shape
        low = _low_bits(k, size)
        upper = torch.zeros(num, k + (size - 1 >> low), dtype=torch.uint8, device=index_Kk.device)
        rank_k = torch.arange(k, device=index_Kk.device)
        upper.scatter_(1, (index_Kk >> low) + rank_k, 1)
        lower = packed_numbers(index_Kk.flatten() & (2**low - 1), low) if low else upper[:0].flatten()
        return torch.cat([lower, packed(upper.flatten(), 1)])

    def decode(self, raw: Tensor, num: int, k: int, size: int) -> Tensor:
        """See `IndexFormat.decode`."""
        low, (lower_bytes, _) = _low_bits(k, size), self._parts(num, k, size)
        width = k + (size - 1 >> low)
        upper = unpacked(raw[lower_bytes:], 1, num * width).view(num, width)
        if not (upper.sum(1, dtype=torch.int64) == k).all():
            raise ValueError(f"payload: a chunk has not the {k} indices it must have")
        index = upper.nonzero()[:, 1].view(num, k) - torch.arange(k, device=raw.device)
        if low:
            index = (index << low) | unpacked_numbers(raw[:lower_bytes], low, num * k).view(num, k)
        return _checked(index, size)

    def _parts(self, num: int, k: int, size: int) -> tuple[int, int]:
        low = _low_bits(k, size)
        return num_bytes(num * k, low), num_bytes(num * (k + (size - 1 >> low)), 1)


def _low_bits(k: int, size: int) -> int:
    """The l that makes `Gaps` smallest; of equal ones the largest, which leaves less to unary."""
    return min(range(16, -1, -1), key=lambda low: k * low + (size - 1 >> low))


def _checked(index_Kk: Tensor, size: int) -> Tensor:
    if not (index_Kk[:, 1:] > index_Kk[:, :-1]).all():
        raise ValueError("payload: the indices of a chunk do not increase")
    if not (index_Kk[:, -1] < size).all():
        raise ValueError(f"payload: an index is {int(index_Kk.max())}, it must be below {size}")
    return index_Kk


INDICES: dict[str, IndexFormat] = {
    "12bit": FixedWidth(bits=12),
    "u16": FixedWidth(bits=16),
    "gaps": Gaps(),
}
"""Name in a codec's name -> format."""
