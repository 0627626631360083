"""Tensor bytes shared by a trainer and its sidecar: one anonymous file, mapped by both.

Only the file descriptor travels. The kernel allocates a page when it is first written, so slots for
transfers that never happen cost nothing.
"""

import contextlib
import mmap
import os
import tempfile
from collections.abc import Sequence

from farflung.units import align


class Arena:
    """Slots of fixed sizes in bytes, each starting on a multiple of ALIGN_BYTES.

    Who may write a slot is agreed by messages; there is no lock.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """Create the memory. The other process maps it with `Arena.open(fd, sizes)`."""
        fd = _anonymous_file()
        os.ftruncate(fd, _total_bytes(sizes))
        self._map(fd, sizes)

    @classmethod
    def open(cls, fd: int, sizes: Sequence[int]) -> "Arena":
        """Map what another process created; takes over the descriptor.

        Raises:
            ValueError: the file has another size than these slots need.
        """
        if os.fstat(fd).st_size != _total_bytes(sizes):
            raise ValueError(f"arena of {os.fstat(fd).st_size} bytes, {_total_bytes(sizes)} expected")
        arena = cls.__new__(cls)
        arena._map(fd, sizes)
        return arena

    def _map(self, fd: int, sizes: Sequence[int]) -> None:
        self.fd = fd
        self.sizes = tuple(sizes)
        self._starts = [sum(align(size) for size in sizes[:i]) for i in range(len(sizes))]
        self._memory = mmap.mmap(fd, _total_bytes(sizes))

    def slot(self, index: int) -> memoryview:
        """The bytes of one slot, writable and shared."""
        start = self._starts[index]
        return memoryview(self._memory)[start : start + self.sizes[index]]

    def close(self) -> None:
        """Close the descriptor, and unmap the memory as soon as no view of it is left."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            with contextlib.suppress(BufferError):  # somebody holds a view; the last one to go unmaps
                self._memory.close()


def _total_bytes(sizes: Sequence[int]) -> int:
    return max(1, sum(align(size) for size in sizes))  # an empty file cannot be mapped


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("farflung-arena")
    fd, path = tempfile.mkstemp(prefix="farflung-arena-")
    os.unlink(path)
    return fd
