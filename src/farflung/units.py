"""Units and names that every floor uses."""

from typing import Literal

KIB = 1024
MIB = 1024 * KIB
CHUNK_BYTES = 8 * MIB  # largest body of one transfer object
ALIGN_BYTES = 64  # buffers start on a cache line, so that vector kernels agree everywhere

Pace = Literal["free", "lockstep"]
Adoption = Literal["overwrite", "mix", "rebase"]
Anchor = Literal["present", "base"]
FinalMerge = Literal["average", "outer", "none"]


def align(num_bytes: int) -> int:
    """Round up to the next multiple of ALIGN_BYTES.

    >>> align(0), align(1), align(64)
    (0, 64, 64)
    """
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
