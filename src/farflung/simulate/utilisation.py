"""How much of the time is compute, at a given bandwidth: a step as a graph of layers.

Nodes are forward, backward and reduction of a layer (the model of Streaming DiLoCo, arXiv 2501.18512, table 4).

Backward takes twice as long as forward. A layer's reduction may begin when its backward has ended; reductions pass
one link one after the other, last layer first. Forward of a layer waits for this layer's reduction of the step
before (tau = 0), or of tau steps earlier. Synchronised are the layers of fragments that are due (`core.schedule`);
in data-parallel training all layers, every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farflung.core.schedule import offsets
from farflung.simulate.cluster import require

FORWARD = 1 / 3  # of a step's compute: backward is twice as long
GIGA = 1e9

Bandwidths = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained.

    Args:
        params: of the model.
        layers: of equal size.
        step_s: compute of one step.
    """

    params: float
    layers: int
    step_s: float

    def __post_init__(self) -> None:
        require(self.params > 0, "params", self.params, "above 0")
        require(self.layers >= 1, "layers", self.layers, "at least 1")
        require(self.step_s > 0, "step_s", self.step_s, "above 0")


@dataclass(frozen=True, kw_only=True)
class Sync:
    """What is synchronised when.

    Args:
        every_steps: H, between two reductions of the same layer; 1 is data-parallel.
        fragments: P, of strided layers (p, p + P, ...); 1 is the whole model.
        overlap_steps: tau.
        bits: per parameter on the wire.
    """

    every_steps: int = 1
    fragments: int = 1
    overlap_steps: int = 0
    bits: float = 16.0


def utilisation(model: Model, sync: Sync, gbps: Sequence[float] | Bandwidths) -> Bandwidths:
    """Compute time / time over one cycle of H steps in the steady state, 0..1, for each bandwidth in Gbit/s.

    >>> model = Model(params=1e9, layers=24, step_s=0.1)
    >>> [round(float(u), 2) for u in utilisation(model, Sync(every_steps=100), [1.0, 10.0, 1000.0])]
    [0.39, 0.87, 1.0]
    """
    rates = np.asarray(gbps, dtype=float) * GIGA
    require(bool(np.all(rates > 0)), "bandwidth", list(np.asarray(gbps)), "above 0")
    layers, H = model.layers, sync.every_steps
    due: dict[int, list[int]] = {}
    for p, step in enumerate(offsets(H, sync.fragments)):
        due.setdefault(step, []).extend(range(p, layers, sync.fragments))
    forward_s, backward_s = (model.step_s * share / layers for share in (FORWARD, 1 - FORWARD))
    reduce_s = model.params * sync.bits / layers / rates
    now, link = np.zeros_like(rates), np.zeros_like(rates)
    waiting: dict[tuple[int, int], Bandwidths] = {}  # (step, layer) -> when its reduction ends
    cycles, began = 3, now
    for step in range(cycles * H):
        if step == (cycles - 1) * H:
            began = now.copy()
        for layer in range(layers):
            ends = waiting.pop((step - 1 - sync.overlap_steps, layer), None)
            now = (now if ends is None else np.maximum(now, ends)) + forward_s
        synced = set(due.get(step % H, ()))
        for layer in reversed(range(layers)):
            now = now + backward_s
            if layer in synced:
                link = np.maximum(now, link) + reduce_s
                waiting[step, layer] = link
    result: Bandwidths = model.step_s * H / (now - began)
    return result


def needed_gbps(model: Model, sync: Sync, targets: Sequence[float], grid: Bandwidths) -> list[float | None]:
    """The smallest bandwidth of a grid at which each target is reached; None: not on this grid."""
    reached = utilisation(model, sync, grid)
    return [float(grid[np.argmax(reached >= t)]) if bool(np.any(reached >= t)) else None for t in targets]
