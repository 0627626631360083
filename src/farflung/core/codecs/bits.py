"""Numbers of a few bits in bytes: the first number in the lowest bits, missing ones at the end are 0."""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad


def packed(code: Tensor, bits: int) -> Tensor:
    """uint8 codes below ``2^bits``, ``8 / bits`` a byte; ``bits`` is 1, 2 or 4.

    >>> packed(torch.tensor([1, 2, 3], dtype=torch.uint8), 2)
    tensor([57], dtype=torch.uint8)
    """
    per_byte = 8 // bits
    missing = -code.numel() % per_byte
    if missing:
        code = pad(code, (0, missing))
    together: Tensor = (code.view(-1, per_byte) << _shifts(bits, code.device)).sum(1, dtype=torch.uint8)
    return together


def unpacked(raw: Tensor, bits: int, num: int) -> Tensor:
    """The first ``num`` uint8 codes of `packed` bytes."""
    code: Tensor = (raw[:, None] >> _shifts(bits, raw.device)) & (2**bits - 1)
    return code.flatten()[:num]


def num_bytes(num: int, bits: int) -> int:
    """Bytes of ``num`` numbers of ``bits`` bits."""
    return -(-num * bits // 8)


def packed_numbers(number: Tensor, bits: int) -> Tensor:
    """Non-negative int32 numbers below ``2^bits``, ``bits`` up to 16, without gaps: `num_bytes` bytes.

    >>> packed_numbers(torch.tensor([0x123, 0xABC], dtype=torch.int32), 12).numpy().tobytes().hex()
    '23c1ab'
    """
    if bits == 16:
        return number.to(torch.uint16).view(torch.uint8)
    if bits == 12:  # two numbers in the lower three bytes of an int32
        pair = pad(number, (0, number.numel() % 2)).view(-1, 2)
        both = pair[:, 0] | (pair[:, 1] << 12)
        return both.view(torch.uint8).view(-1, 4)[:, :3].flatten()[: num_bytes(number.numel(), 12)]
    return packed_numbers_plain(number, bits)


def packed_numbers_plain(number: Tensor, bits: int) -> Tensor:
    """`packed_numbers`, bit by bit."""
    bit = (number[:, None] >> torch.arange(bits, dtype=torch.int32, device=number.device)) & 1
    return packed(bit.to(torch.uint8).flatten(), 1)


def unpacked_numbers(raw: Tensor, bits: int, num: int) -> Tensor:
    """The int32 numbers of `packed_numbers`; ``raw`` may lie at any address."""
    if bits == 16:
        low_high = raw.view(-1, 2).int()
        return low_high[:, 0] | (low_high[:, 1] << 8)
    if bits == 12:
        both = pad(pad(raw, (0, -raw.numel() % 3)).view(-1, 3), (0, 1)).view(torch.int32)
        return torch.cat([both & 0xFFF, both >> 12], 1).flatten()[:num]
    return unpacked_numbers_plain(raw, bits, num)


def unpacked_numbers_plain(raw: Tensor, bits: int, num: int) -> Tensor:
    """`unpacked_numbers`, bit by bit."""
    bit = unpacked(raw, 1, num * bits).view(num, bits).int()
    number: Tensor = (bit << torch.arange(bits, dtype=torch.int32, device=raw.device)).sum(
        1, dtype=torch.int32
    )
    return number


@cache
def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)
