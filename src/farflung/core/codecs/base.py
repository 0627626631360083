"""What a codec is, and the checks and byte views that all codecs share."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

STRIP = 2**18
"""Elements handled at once: temporaries (1 MiB in fp32) stay in cache, extra memory stays small."""


class Codec(Protocol):
    """fp32 vector <-> bytes: ``decode(encode(x), N)`` approximates ``x``; each codec says how well."""

    @property
    def name(self) -> str:
        """Name in recipes and on the wire."""
        ...

    def size_bytes(self, num_elements: int) -> int:
        """Exact payload size for a vector of ``num_elements``, without running."""
        ...

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Payload of a contiguous fp32 vector, as uint8 vector of `size_bytes`; into ``out`` if given.

        Raises:
            ValueError: ``x`` is no contiguous fp32 vector, or ``out`` does not fit.
        """
        ...

    def decode(self, payload: Tensor, num_elements: int, out: Tensor | None = None) -> Tensor:
        """fp32 vector of ``num_elements`` from a uint8 payload at any address; into ``out`` if given.

        Raises:
            ValueError: the payload's size is not ``size_bytes(num_elements)``, or ``out`` does not fit.
        """
        ...


def payload_for(x: Tensor, size_bytes: int, out: Tensor | None) -> Tensor:
    """Check ``encode``'s arguments; the payload buffer to write."""
    _check("x", x, torch.float32, x.numel())
    if out is None:
        return torch.empty(size_bytes, dtype=torch.uint8, device=x.device)
    return _check("out", out, torch.uint8, size_bytes)


def vector_for(payload: Tensor, size_bytes: int, num_elements: int, out: Tensor | None) -> Tensor:
    """Check ``decode``'s arguments; the fp32 vector to write."""
    check_payload(payload, size_bytes)
    return room_for(num_elements, payload.device, out)


def check_payload(payload: Tensor, size_bytes: int) -> None:
    """Refuse what is no uint8 vector of this size."""
    _check("payload", payload, torch.uint8, size_bytes)


def room_for(num_elements: int, device: torch.device, out: Tensor | None) -> Tensor:
    """``out``, if it fits; else a new fp32 vector."""
    if out is None:
        return torch.empty(num_elements, device=device)
    return _check("out", out, torch.float32, num_elements)


def strips(num_elements: int) -> Iterator[slice]:
    """Cut ``0:num_elements`` into slices of `STRIP` elements, the last one possibly shorter."""
    for start in range(0, num_elements, STRIP):
        yield slice(start, min(start + STRIP, num_elements))


def typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as elements of ``dtype``: a view, or a copy where the address is not aligned for it."""
    aligned = raw.data_ptr() % dtype.itemsize == 0 and raw.storage_offset() % dtype.itemsize == 0
    return (raw if aligned else raw.clone()).view(dtype)


def _check(what: str, tensor: Tensor, dtype: torch.dtype, size: int) -> Tensor:
    if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{what} must be a contiguous vector of {dtype}, not {tensor.dtype} {list(tensor.shape)}"
        )
    if tensor.numel() != size:
        raise ValueError(f"{what} has {tensor.numel()} elements, need {size}")
    return tensor
