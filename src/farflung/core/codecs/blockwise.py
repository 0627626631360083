"""Codecs with one scale per block of elements: int8, and the 4-bit float E3M0.

Payload: ``ceil(N / B)`` fp32 scales, then the codes of all elements in order. The scale of a block is its
largest magnitude, so it adapts to the very different sizes that tensors in one fragment have.

A block that holds NaN or infinity gets a non-finite scale and decodes to non-finite values throughout. A
block whose largest magnitude is below `TINY` decodes to zeros. Legend: B elements per block, K blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import final

import torch
from torch import Tensor

from farflung.core.codecs.base import STRIP, payload_for, strips, typed, vector_for

TINY = 2.0**-100
"""Blocks with all magnitudes below this (8e-31) are zero: no update is that small, and quotients with
subnormal numbers differ between machines that flush them and machines that do not."""

_SCALE_BYTES = 4


@final
@dataclass(frozen=True, kw_only=True)
class Int8:
    """Blockwise absmax int8: ``q = round(x / s)``, ``s = max|x| / 127``, decoded as ``q s``.

    Absolute error at most ``s / 2``, up to fp32 rounding; 8.125 bits per element with the default block.
    ``round`` is to nearest even; -128 is not used, so the code is symmetric. Magnitudes up to 2^127.

    Args:
        block: elements that share a scale. 256 costs 1.6 % for scales and isolates an outlier to 1 KiB of
            parameters; a power of two up to `STRIP`.

    >>> codec = Int8()
    >>> codec.size_bytes(300)  # two scales
    308
    >>> codec.decode(codec.encode(torch.tensor([127.0, -1.0, 0.4])), 3)
    tensor([127.,  -1.,   0.])
    """

    block: int = 256
    name: str = "int8"

    def __post_init__(self) -> None:
        _check_block(self.block)

    def size_bytes(self, num_elements: int) -> int:
        """``N + 4 ceil(N / B)``."""
        return num_elements + _SCALE_BYTES * _num_blocks(num_elements, self.block)

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Codec.encode`."""
        payload = payload_for(x, self.size_bytes(x.numel()), out)
        return _encode(x, payload, self.block, 1, _int8_codes)

    def decode(self, payload: Tensor, num_elements: int, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`."""
        y = vector_for(payload, self.size_bytes(num_elements), num_elements, out)
        return _decode(payload, y, self.block, 1, _int8_values)


@final
@dataclass(frozen=True, kw_only=True)
class E3M0:
    """4-bit float without mantissa: sign and 3 exponent bits, times the block's scale ``s = max|x|``.

    Exponent ``e = 1..7`` means ``+-s 2^(e - 7)``; ``e = 0`` means zero (as in IEEE formats, where it is the
    subnormal range, whose mantissa is empty here). So the values are 0 and ``s`` times 1, 1/2, ... 1/64, and
    an untouched embedding row costs no noise. ``|x| / s`` rounds to the nearest *value*; ties go up.
    Relative error at most 1/3 above ``s / 64``, absolute error at most ``s / 128`` below; 4.125 bits per
    element with the default block. Two codes a byte, the first in the low half; bit 3 of a code is the sign.

    Source: Streaming DiLoCo (arXiv 2501.18512, section 2.4: E3M0 outer gradients, accumulated in fp32);
    Decoupled DiLoCo (2604.21428: +0.09 % loss). Neither publishes scale granularity or the meaning of
    ``e = 0``; both are our reading.

    Args:
        block: elements that share a scale; a power of two from 2 to `STRIP`.

    >>> codec = E3M0()
    >>> codec.size_bytes(3)  # one scale, two bytes of codes
    6
    >>> codec.decode(codec.encode(torch.tensor([8.0, -5.0, 0.01])), 3)
    tensor([ 8., -4.,  0.])
    """

    block: int = 256
    name: str = "int4"

    def __post_init__(self) -> None:
        _check_block(self.block)

    def size_bytes(self, num_elements: int) -> int:
        """``ceil(N / 2) + 4 ceil(N / B)``."""
        return (num_elements + 1) // 2 + _SCALE_BYTES * _num_blocks(num_elements, self.block)

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Codec.encode`."""
        payload = payload_for(x, self.size_bytes(x.numel()), out)
        return _encode(x, payload, self.block, 2, _e3m0_codes)

    def decode(self, payload: Tensor, num_elements: int, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`."""
        y = vector_for(payload, self.size_bytes(num_elements), num_elements, out)
        return _decode(payload, y, self.block, 2, _e3m0_values)


def _encode(
    x: Tensor,
    payload: Tensor,
    block: int,
    per_byte: int,
    quantise: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """``quantise``: finite-or-not blocks [K, B] -> fp32 scales [K] and code bytes [K * B / per_byte]."""
    num_scale_bytes = _SCALE_BYTES * _num_blocks(x.numel(), block)
    scales, codes = payload[:num_scale_bytes], payload[num_scale_bytes:]
    for at in strips(x.numel()):
        scale_K, code = quantise(_padded(x[at], block).view(-1, block))
        scales[_scale_bytes(at, block)] = scale_K.view(torch.uint8)
        to = _code_bytes(at, per_byte)
        codes[to] = code[: to.stop - to.start]
    return payload


def _decode(
    payload: Tensor, y: Tensor, block: int, per_byte: int, expand: Callable[[Tensor, Tensor], None]
) -> Tensor:
    """``expand``: code bytes [K * B / per_byte], fp32 vector to fill with the unscaled values."""
    num_scale_bytes = _SCALE_BYTES * _num_blocks(y.numel(), block)
    scales, codes = payload[:num_scale_bytes], payload[num_scale_bytes:]
    for at in strips(y.numel()):
        scale_K1 = typed(scales[_scale_bytes(at, block)], torch.float32)[:, None]
        code, part = codes[_code_bytes(at, per_byte)], y[at]
        if part.numel() % block == 0 and part.data_ptr() % 8 == 0 and part.storage_offset() % 2 == 0:
            expand(code, part)
            part.view(-1, block).mul_(scale_K1)
        else:
            whole = part.new_empty(scale_K1.numel() * block)
            expand(_padded(code, block // per_byte), whole)
            part.copy_(whole.view(-1, block).mul_(scale_K1).view(-1)[: part.numel()])
    return y


def _num_blocks(num_elements: int, block: int) -> int:
    return -(-num_elements // block)


def _scale_bytes(at: slice, block: int) -> slice:
    return slice(_SCALE_BYTES * (at.start // block), _SCALE_BYTES * _num_blocks(at.stop, block))


def _code_bytes(at: slice, per_byte: int) -> slice:
    return slice(at.start // per_byte, -(-at.stop // per_byte))


def _padded(x: Tensor, multiple: int) -> Tensor:
    missing = -x.numel() % multiple
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _check_block(block: int) -> None:
    if not (2 <= block <= STRIP and block & (block - 1) == 0):
        raise ValueError(f"block = {block} must be a power of two from 2 to {STRIP}")


def _scaled(x_KB: Tensor, top: float) -> tuple[Tensor, Tensor]:
    """Scales ``max|x| / top`` and finite quotients ``x / scale``.

    Tiny blocks: scale zero, quotients that round to zero. Non-finite blocks: non-finite scale, quotients
    zero, because converting NaN to an integer is undefined.
    """
    quotient_KB = x_KB.abs()
    max_K = quotient_KB.amax(1)
    scale_K = torch.where(max_K < TINY, 0.0, max_K / top)
    torch.div(x_KB, torch.where(scale_K == 0.0, 1.0, scale_K)[:, None], out=quotient_KB)
    finite_K = torch.isfinite(scale_K)
    if not finite_K.all():
        quotient_KB[~finite_K] = 0.0
    return scale_K, quotient_KB


def _int8_codes(x_KB: Tensor) -> tuple[Tensor, Tensor]:
    scale_K, quotient_KB = _scaled(x_KB, 127.0)
    return scale_K, quotient_KB.round_().to(torch.int8).view(-1).view(torch.uint8)


def _int8_values(code: Tensor, out: Tensor) -> None:
    out.copy_(code.view(torch.int8))


def _e3m0_codes(x_KB: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest codes from the bits of ``|x| / s <= 1``: ten times faster than searching the seven thresholds.

    A fp32 number shifted right by 22 is ``2 exponent + (mantissa >= 1.5)``, and 1.5 is where rounding
    between powers of two turns. Less 239 and clamped it is h = 0 below 2^-7, 1 to 3 up to 1.5 * 2^-6, then
    two per code: ``e = h >> 1``, but 1 for h = 1, because there the neighbour below is zero.
    """
    scale_K, quotient_KB = _scaled(x_KB, 1.0)
    sign = torch.signbit(quotient_KB).view(torch.uint8)
    bits = quotient_KB.abs_().view(torch.int32)
    h = bits.bitwise_right_shift_(22).sub_(239).clamp_(min=0).to(torch.uint8)
    code = torch.maximum(h >> 1, h.clamp(max=1)).add_(sign, alpha=8)
    pair = code.view(-1).view(torch.int16)
    return scale_K, (pair | (pair >> 4)).to(torch.uint8)


def _e3m0_values(code: Tensor, out: Tensor) -> None:
    """Both values of a byte with one look-up of eight bytes."""
    torch.index_select(_e3m0_pairs(code.device), 0, code.int(), out=out.view(torch.int64))


@cache
def _e3m0_pairs(device: torch.device) -> Tensor:
    half = [0.0] + [2.0 ** (e - 7) for e in range(1, 8)]
    value = half + [-v for v in half]
    pairs = torch.tensor([[value[byte & 15], value[byte >> 4]] for byte in range(256)], device=device)
    return pairs.view(torch.int64).view(-1)
