"""Units and names that every floor uses."""

from typing import Literal

KIB = 1024
MIB = 1024 * KIB
CHUNK_BYTES = 8 * MIB  # largest body of one transfer object
FRAME_BYTES = 36  # header in front of every such body (farflung.runtime.chunks)
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


def packed_starts(*sections: int) -> list[int]:
    """Start of each section of so many bytes, and the end of the last.

    Sections that are not empty start at a multiple of ALIGN_BYTES; an empty one has no place.

    >>> packed_starts(12, 8, 0)
    [0, 64, 0, 72]
    """
    starts, end = [], 0
    for num_bytes in sections:
        starts.append(align(end) if num_bytes else 0)
        end = starts[-1] + num_bytes if num_bytes else end
    return [*starts, end]
