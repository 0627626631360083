"""Codecs of two bits and of one bit an element, for outer gradients that must be very small.

Payload: the statistics of all blocks, then the codes of all elements in order. Statistics are over the
elements that a block has, in float64, so the last, shorter block is not diluted by padding.

As in `blockwise`: a block that holds NaN or infinity decodes to non-finite values throughout and has codes of
zero; a block whose largest magnitude is below `TINY` decodes to zeros. Both codecs lose much of a vector:
`encode_with_feedback` sends the rest later. Legend: B elements per block, K blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from farflung.core.codecs.base import STRIP, payload_for, strips, typed, vector_for
from farflung.core.codecs.bits import packed, unpacked
from farflung.core.codecs.blockwise import TINY

Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Finite or not, blocks [K, B] in float64 -> statistics [K, s] and codes [K, B]."""


@final
@dataclass(frozen=True, kw_only=True)
class TwoBit:
    """Four bins around the block's mean, each decoded as the mean of what fell into it.

    ``code = [x >= m - w] + [x >= m] + [x >= m + w]`` with mean m and ``w = 1.5 sigma`` of the block; the four bin
    means travel as bf16, 0 for an empty bin. Up to that rounding the error of a block sums to zero and its norm
    is at most that of ``x - m``; for normal numbers it is 0.40 of it. There is no exact zero: an untouched
    element becomes the mean of its bin. 2.25 bits per element with the default block; four codes a byte, the
    first in the lowest bits.

    Source: the values of SparseLoCo (arXiv 2508.15706), where a tensor's sent values share the statistics.
    "1.5 sigma" is read as the width of a bin, with the mean on the edge between the two inner ones; here a
    block takes the place of the tensor, because a fragment holds tensors of very different sizes.

    Args:
        block: elements that share statistics; a power of two from 8 to `STRIP`.

    >>> codec = TwoBit()
    >>> codec.size_bytes(300)  # two times four means, 75 bytes of codes
    91
    >>> codec.decode(codec.encode(torch.tensor([8.0, 1.0, 3.0, -2.0, -2.0, -2.0])), 6)
    tensor([ 8.,  2.,  2., -2., -2., -2.])
    """

    block: int = 256
    name: str = "2bit"

    def __post_init__(self) -> None:
        _check_block(self.block)

    def size_bytes(self, num_elements: int) -> int:
        """``ceil(N / 4) + 8 ceil(N / B)``."""
        return -(-num_elements // 4) + 8 * -(-num_elements // self.block)

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Codec.encode`."""
        payload = payload_for(x, self.size_bytes(x.numel()), out)
        return _encode(x, payload, self.block, 2, 8, _bins)

    def decode(self, payload: Tensor, num_elements: int, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`."""
        y = vector_for(payload, self.size_bytes(num_elements), num_elements, out)
        return _decode(
            payload, y, self.block, 2, 8, lambda raw: typed(raw, torch.bfloat16).view(-1, 4).float()
        )


@final
@dataclass(frozen=True, kw_only=True)
class OneBit:
    """The sign, times the block's mean magnitude: ``y = s`` or ``-s``, ``s = mean |x|``.

    Of all ``s`` this one has the least squared error. Zero has the sign of its sign bit, so an untouched element
    becomes noise of ``s``. 1.125 bits per element with the default block; eight codes a byte, the first in
    the lowest bit, 1 for negative; ``s`` is fp32.

    Source: Decoupled DiLoCo (arXiv 2604.21428) reports 1-bit outer gradients without saying how they are made;
    sign and mean magnitude is 1-bit SGD's lineage (signSGD with a scale).

    Args:
        block: elements that share a magnitude; a power of two from 8 to `STRIP`.

    >>> codec = OneBit()
    >>> codec.size_bytes(300)  # two magnitudes, 38 bytes of signs
    46
    >>> codec.decode(codec.encode(torch.tensor([3.0, -1.0, 0.5])), 3)
    tensor([ 1.5000, -1.5000,  1.5000])
    """

    block: int = 256
    name: str = "1bit"

    def __post_init__(self) -> None:
        _check_block(self.block)

    def size_bytes(self, num_elements: int) -> int:
        """``ceil(N / 8) + 4 ceil(N / B)``."""
        return -(-num_elements // 8) + 4 * -(-num_elements // self.block)

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Codec.encode`."""
        payload = payload_for(x, self.size_bytes(x.numel()), out)
        return _encode(x, payload, self.block, 1, 4, _signs)

    def decode(self, payload: Tensor, num_elements: int, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`."""
        y = vector_for(payload, self.size_bytes(num_elements), num_elements, out)
        return _decode(payload, y, self.block, 1, 4, _signed_magnitudes)


def _bins(x_KB: Tensor) -> tuple[Tensor, Tensor]:
    mean_K1 = x_KB.mean(1, keepdim=True)
    width_K1 = 1.5 * (x_KB - mean_K1).square_().mean(1, keepdim=True).sqrt_()
    code_KB = (x_KB >= mean_K1 - width_K1).to(torch.uint8)
    code_KB += x_KB >= mean_K1
    code_KB += x_KB >= mean_K1 + width_K1
    in_bin_4KB = [code_KB == code for code in range(4)]
    means_4K = [(x_KB * hit).sum(1) / hit.sum(1).clamp_(min=1) for hit in in_bin_4KB]
    return torch.stack(means_4K, 1).to(torch.bfloat16), code_KB


def _signs(x_KB: Tensor) -> tuple[Tensor, Tensor]:
    return x_KB.abs().mean(1, keepdim=True).float(), torch.signbit(x_KB).to(torch.uint8)


def _signed_magnitudes(raw: Tensor) -> Tensor:
    """What codes 0 and 1 mean in each block [K, 2]."""
    magnitude_K = typed(raw, torch.float32)
    return torch.stack([magnitude_K, -magnitude_K], 1)


def _encode(x: Tensor, payload: Tensor, block: int, bits: int, stat_bytes: int, quantise: Quantise) -> Tensor:
    num_stat_bytes = stat_bytes * -(-x.numel() // block)
    stats, codes = payload[:num_stat_bytes], payload[num_stat_bytes:]
    for at in _whole_and_rest(x.numel(), block):
        x_KB = x[at].view(-1, min(block, at.stop - at.start))
        stat, code_KB = quantise(x_KB.double())
        top_K = x_KB.abs().amax(1)
        finite_K = torch.isfinite(top_K)
        stat[top_K < TINY] = 0.0
        if not finite_K.all():
            stat[~finite_K] = torch.nan
            code_KB[~finite_K] = 0
        stats[_blocks(at, block, stat_bytes)] = stat.view(torch.uint8).flatten()
        codes[_bytes(at, bits)] = packed(code_KB.flatten(), bits)
    return payload


def _decode(
    payload: Tensor,
    y: Tensor,
    block: int,
    bits: int,
    stat_bytes: int,
    meanings: Callable[[Tensor], Tensor],
) -> Tensor:
    """``meanings``: bytes of K statistics -> what each code means in each block, fp32 [K, 2^bits]."""
    num_stat_bytes = stat_bytes * -(-y.numel() // block)
    stats, codes = payload[:num_stat_bytes], payload[num_stat_bytes:]
    for at in _whole_and_rest(y.numel(), block):
        value_KV = meanings(stats[_blocks(at, block, stat_bytes)])
        code = unpacked(codes[_bytes(at, bits)], bits, at.stop - at.start)
        code_KB = code.view(len(value_KV), -1).long()
        y[at] = value_KV.gather(1, code_KB).flatten()
    return y


def _whole_and_rest(num_elements: int, block: int) -> list[slice]:
    """Strips of whole blocks, then the shorter last block."""
    whole = num_elements - num_elements % block
    rest = [slice(whole, num_elements)] if whole < num_elements else []
    return [*strips(whole), *rest]


def _blocks(at: slice, block: int, stat_bytes: int) -> slice:
    """Where the statistics of a part of the vector lie."""
    return slice(at.start // block * stat_bytes, -(-at.stop // block) * stat_bytes)


def _bytes(at: slice, bits: int) -> slice:
    """Where the codes of a part of the vector lie."""
    return slice(at.start * bits // 8, -(-at.stop * bits // 8))


def _check_block(block: int) -> None:
    if not (8 <= block <= STRIP and block & (block - 1) == 0):
        raise ValueError(f"block = {block} must be a power of two from 8 to {STRIP}")
