"""How much memory a learner's compressed round takes beside what it holds anyway."""

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import nn

from farflung.bench.measure import Measurement, Settings
from farflung.core.fragments import make_plan
from farflung.core.vectors import describe
from farflung.engine.island import Island
from farflung.engine.make import slot_sizes
from farflung.lab.body import Slots
from farflung.methods import METHODS, Method
from farflung.protocol.mailbox import Settle, Snapshot
from farflung.units import KIB, MIB

MEASURED = ("sparseloco", "dct_momentum_shared", "muloco")


def measure_peak(settings: Settings) -> Measurement:
    """Peak of one snapshot over one fragment and its new state, the largest of some methods."""
    peaks = {name: _peak(settings, METHODS[name](overlap_steps=0)) for name in MEASURED}
    ratios = tuple(peak // KIB * KIB / (2 * settings.vector_bytes) for peak in peaks.values())
    return Measurement(
        ratios=(max(ratios),),
        reference=2 * settings.vector_bytes / MIB,
        unit="MiB",
        what="peak memory that a snapshot adds (feedback, encode, decode), against a fragment and its new state",
        aim=1.0,
        less_is_better=True,
        note=", ".join(f"{name} {ratio:.2f}" for name, ratio in zip(peaks, ratios, strict=True)),
    )


def _peak(settings: Settings, method: Method) -> int:
    """Bytes that a snapshot adds at its peak: of the second one, for which scratch memory is there."""
    model = nn.Linear(1024, settings.vector_bytes // 4 // 1024, bias=False)
    plan = make_plan(describe(model), 1, method.policy.fragment_plan)
    up, down = slot_sizes(plan, method)
    island = Island(model, plan, method, Slots(up), Slots(down))
    for round in range(2):
        with torch.no_grad():
            model.weight.mul_(1.01)
        island.boundary(1)
        island.post(Snapshot(fragment=0, round=round))
        added = peak_of(island.idle)
        island.post(Settle(fragment=0, round=round, merged=False))
    return added


def peak_of(work: Callable[[], object]) -> int:
    """Bytes by which torch's memory grows at most while something works."""
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        work()
    changes = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return int(max(accumulate((event.nbytes() for event in changes), initial=0)))
