"""Merging contributions and taking the outer step, as the syncer does it."""

import torch

from farflung.bench.measure import Measurement, Settings
from farflung.bench.memory import against_copy
from farflung.core.merge import Rule, Segment, merge_and_step
from farflung.core.outer import Nesterov

NUM_CONTRIBUTIONS = 8
READS = {"avg": 1, "rda": 2}  # of each contribution: RDA needs the norms first
AIMS = {"avg": 0.5, "rda": 0.4}


def measure_merge(settings: Settings, rule: Rule) -> Measurement:
    """Merge eight contributions, one tensor each, by one rule, with a Nesterov step."""
    size = settings.vector_bytes // 4
    generator = torch.Generator().manual_seed(0)
    deltas = [torch.randn(size, generator=generator) for _ in range(NUM_CONTRIBUTIONS)]
    theta, outer = torch.randn(size, generator=generator), Nesterov(lr=0.7)
    state, new_theta = outer.init(theta), torch.empty(size)
    new_state = {name: torch.empty_like(value) for name, value in state.items()}
    weights = [1 / NUM_CONTRIBUTIONS] * NUM_CONTRIBUTIONS
    segments = [Segment(start=0, stop=size, rule=rule)]

    def merge() -> None:
        merge_and_step(theta, deltas, weights, segments, outer, state, new_theta, new_state)

    touched = READS[rule] * NUM_CONTRIBUTIONS + 2 * (1 + len(state))  # theta and state: read and written
    passes = "once" if rule == "avg" else "twice"
    what = (
        f"{rule.upper()} merge of 8 contributions with Nesterov: bytes/s, each contribution counted {passes}"
    )
    return against_copy(settings, merge, touched * settings.vector_bytes, what, AIMS[rule])
