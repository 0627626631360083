"""Memory bandwidth, the limit that merges and codecs are measured against."""

from collections.abc import Callable

import torch

from farflung.bench.measure import Measurement, Settings, Speed, interleave, speed_of
from farflung.units import MIB

COPIES = 3  # of each reading: as long as the shorter things that are compared with it


def copy_speed(settings: Settings) -> Speed:
    """Bytes/s that ``copy_`` between two reused buffers reads and writes."""
    source = torch.ones(settings.vector_bytes, dtype=torch.uint8)  # zeros may all be one page of the kernel's
    target = torch.ones_like(source)

    def copy() -> None:
        for _ in range(COPIES):
            target.copy_(source)

    return speed_of(copy, COPIES * 2 * settings.vector_bytes)


def against_copy(
    settings: Settings, work: Callable[[], object], touched_bytes: int, what: str, aim: float | None = None
) -> Measurement:
    """How fast `work` goes through the bytes that it must touch, against a plain copy."""
    ours, reference = speed_of(work, touched_bytes), copy_speed(settings)
    for warm_up in (ours, reference):
        warm_up()
    ratios, copied = interleave(ours, reference, settings.repetitions)
    note = f"{touched_bytes / MIB:.4g} MiB"
    return Measurement(ratios=ratios, reference=copied / 1e9, unit="GB/s", what=what, aim=aim, note=note)
