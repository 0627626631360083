"""Codecs that cast every element: fp32 as it is, and bf16."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from farflung.core.codecs.base import payload_for, strips, typed, vector_for


@final
@dataclass(frozen=True, kw_only=True)
class Cast:
    """Each element as one little-endian number of ``dtype``, rounded to nearest even.

    bf16 keeps fp32's range with 8 significant bits: relative error at most 2^-8 (numbers above 3.39e38 round
    to infinity). Use it for deltas; bf16 *values* of parameters lose small updates.

    >>> FP32.size_bytes(3), BF16.size_bytes(3)
    (12, 6)
    >>> BF16.decode(BF16.encode(torch.tensor([1.0, 1.003])), 2)
    tensor([1., 1.])
    """

    name: str
    dtype: torch.dtype

    def size_bytes(self, num_elements: int) -> int:
        """``N * itemsize``."""
        return num_elements * self.dtype.itemsize

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Codec.encode`."""
        payload = payload_for(x, self.size_bytes(x.numel()), out)
        for at in strips(x.numel()):
            payload[self._bytes(at)] = x[at].to(self.dtype).view(torch.uint8)
        return payload

    def decode(self, payload: Tensor, num_elements: int, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`."""
        y = vector_for(payload, self.size_bytes(num_elements), num_elements, out)
        for at in strips(num_elements):
            y[at] = typed(payload[self._bytes(at)], self.dtype)
        return y

    def _bytes(self, at: slice) -> slice:
        return slice(self.size_bytes(at.start), self.size_bytes(at.stop))


FP32 = Cast(name="fp32", dtype=torch.float32)
BF16 = Cast(name="bf16", dtype=torch.bfloat16)
