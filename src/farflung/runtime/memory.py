"""Keep freed memory: bulk buffers come and go, and fresh pages cost as much as copying them."""

import contextlib
import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEEP_BYTES = 256 * 1024 * 1024


def keep_freed_memory() -> None:
    """Ask glibc's malloc to reuse large blocks instead of returning them to the kernel; elsewhere nothing."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, KEEP_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)
