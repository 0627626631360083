"""Reused byte buffers that are never written while somebody still reads them.

A fresh 64 MiB allocation costs about as much as copying 64 MiB (the kernel zeroes its pages), so versions and
contributions come from a pool. A buffer that is being served over a socket or written to disk may already be
free here: it is *lent*, and the pool passes it over until its last reader is gone.
"""

import weakref
from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor


class Buffer:
    """``num_bytes`` bytes, 64-byte aligned, as a uint8 vector `raw`."""

    def __init__(self, num_bytes: int) -> None:
        self.raw = torch.empty(num_bytes, dtype=torch.uint8)
        self._reader: weakref.ref[np.ndarray[Any, Any]] | None = None

    @property
    def is_lent(self) -> bool:
        """Whether a view from `lend` is alive somewhere."""
        return self._reader is not None and self._reader() is not None

    def lend(self) -> "np.ndarray[Any, Any]":
        """A view of the bytes; the pool leaves the buffer alone while it, or a view of it, is alive."""
        view = self._reader() if self._reader else None
        if view is None:
            view = self.raw.numpy()
            self._reader = weakref.ref(view)
        return view


class Pool:
    """Free buffers by size. Takes and gives may come from several threads."""

    def __init__(self) -> None:
        self._free: dict[int, deque[Buffer]] = defaultdict(deque)

    def take(self, num_bytes: int) -> Buffer:
        """A buffer with arbitrary content: a free one that nobody reads, else a new one."""
        free = self._free[num_bytes]
        for _ in range(len(free)):
            try:
                buffer = free.popleft()
            except IndexError:  # another thread was faster
                break
            if not buffer.is_lent:
                return buffer
            free.append(buffer)
        return Buffer(num_bytes)

    def give(self, buffer: Buffer) -> None:
        """Take back a buffer that the caller no longer uses."""
        self._free[buffer.raw.numel()].append(buffer)


def digest(values: Tensor) -> str:
    """xxh3-128 (32 hex digits) of a contiguous tensor's bytes, wherever it lives.

    >>> digest(torch.tensor([])) == xxhash.xxh3_128_hexdigest(b"")
    True
    """
    return xxhash.xxh3_128_hexdigest(values.detach().cpu().view(torch.uint8).numpy().data)
