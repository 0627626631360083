"""The papers' tables, simulated: each cell beside its published value. All shares are fractions, 0..1.

`TABLE1_FIT` holds what is not published and was found by fitting, one set for all 30 cells: docs/simulate.md.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from farflung.errors import UserError, did_you_mean
from farflung.simulate import published
from farflung.simulate.cluster import Burst, Cluster, Outage
from farflung.simulate.outcome import finite
from farflung.simulate.returns import Returns
from farflung.simulate.scenario import Scenario, policy_of
from farflung.simulate.simulating import USUAL, Effort, simulate
from farflung.simulate.utilisation import Model, Sync, needed_gbps

Cell = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The parameters behind table 1, the same for all cells.

    Args:
        reconfigure_s: seconds that a job stands to go on without chips, to take them in, or to start again.
        away_s: mean time that failed chips stay away, seconds.
        shape, exponent: of the exponentiated Weibull distribution of that time.
    """

    reconfigure_s: float
    away_s: float
    shape: float
    exponent: float

    def cluster(self, chips: int, elastic: bool = True) -> Cluster:
        returns = Returns.of_mean(self.away_s, self.shape, self.exponent)
        stands_s = self.reconfigure_s
        return Cluster(chips=chips, returns=returns, down_s=stands_s, up_s=stands_s, elastic=elastic)


TABLE1_FIT = Fit(reconfigure_s=15.0, away_s=62.0, shape=1.0, exponent=1.0)

GRID = np.logspace(-1, 3, 50)
"""Gbit/s at which Streaming DiLoCo's table 4 was simulated."""
WIRE_BITS = 13.4
"""Bits per parameter at 16-bit precision that fit Streaming DiLoCo's table best: 35 of its 40 cells are exact.
With 16 all 40 lie within one step of the grid, too, but 9 are exact. 4 bit: a quarter of it."""
CYCLE_STEPS = 100  # H of that table
LAYERS_A_FRAGMENT = 3
OVERLAP_STEPS = 1  # with more, it would need less bandwidth than published

EXTRA_SHARE = 0.5
"""Part of the token budget with table 4's extra compute: fits its decoupled row to half a point."""
RESHARDING = 0.22
"""Time that data-parallel training stands in table 4 to change its size, of the time of the run without extra."""


def table1(effort: Effort = USUAL, methods: Mapping[str, str] | None = None) -> Iterator[Cell]:
    """Goodput by learners and chips.

    Args:
        effort: how exact.
        methods: other methods in the place of a row's, {row: method}; for what lies beyond the paper.
    """
    for (row, M), values in published.TABLE1.items():
        for chips, value in zip(published.CHIPS, values, strict=True):
            cluster = TABLE1_FIT.cluster(chips, elastic=row != "data_parallel")
            yield _cell(row, M, cluster, value / 100, effort, (methods or {}).get(row))


def _cell(
    row: str, M: int, cluster: Cluster, value: float | None, effort: Effort, method: str | None = None
) -> Cell:
    name = method or row.removeprefix("elastic_")
    outcome = simulate(Scenario(method=name, learners=M, cluster=cluster), effort)
    return {
        "method": method or row, "learners": M, "chips": cluster.chips, "goodput": outcome.goodput.mean,
        "goodput_ci": finite(outcome.goodput.interval), "uptime": outcome.uptime.mean, "published": value,
        "merge_breadth": outcome.merge_breadth.mean, "merged_share": outcome.merged_share.mean,
        "lost": outcome.lost, "seeds": outcome.seeds,
    }  # fmt: skip


def table1_gasloc(effort: Effort = USUAL) -> Iterator[Cell]:
    """Table 1's islands with GASLoC in the place of a syncer; the decoupled value of the paper beside it."""
    for (row, M), values in published.TABLE1.items():
        if row == "decoupled":
            for chips, value in zip(published.CHIPS, values, strict=True):
                yield _cell(row, M, TABLE1_FIT.cluster(chips), value / 100, effort, "gasloc")


HOST_SHARE = 0.5  # of all chip failures that are those of whole hosts, in `correlated`
HOST_CHIPS = 8
REGIONS, REGION_EVERY_S, REGION_LASTS_S = 8, 30 * 86_400.0, 4 * 3600.0
POWER_FEEDS, POWER_EVERY_S, POWER_LASTS_S = 2, 120 * 86_400.0, 2 * 3600.0


def correlated(cluster: Cluster) -> Cluster:
    """The same failures of chips a year, half of them as whole hosts; and regions and power feeds go dark.

    Chosen, not measured: 8 regions, each dark for 4 h once in 30 days; 2 power feeds, 2 h once in 120 days.
    """
    host = Burst(name="host", chips=HOST_CHIPS, mtbi_s=cluster.mtbi_s / HOST_SHARE)
    region = Outage(
        name="region", num_domains=REGIONS, mtbi_s=REGION_EVERY_S, lasts=Returns.of_mean(REGION_LASTS_S)
    )
    power = Outage(
        name="power", num_domains=POWER_FEEDS, mtbi_s=POWER_EVERY_S, lasts=Returns.of_mean(POWER_LASTS_S)
    )
    single = cluster.mtbi_s / (1 - HOST_SHARE)
    return replace(cluster, mtbi_s=single, bursts=(host,), outages=(region, power))


def table1_correlated(effort: Effort = USUAL) -> Iterator[Cell]:
    """Table 1 where failures are not independent: `correlated`."""
    for (row, M), values in published.TABLE1.items():
        for chips, value in zip(published.CHIPS, values, strict=True):
            cluster = correlated(TABLE1_FIT.cluster(chips, elastic=row != "data_parallel"))
            yield _cell(row, M, cluster, value / 100, effort)


# ---- table 5 -------------------------------------------------------------------------------------------

UNEVEN = 0.18
INJECTED = 0.10
TABLE5_ROWS: dict[str, tuple[str, dict[str, Any], float | None]] = {
    "K = M": ("streaming", {"num_fragments": 24, "sync_every_steps": 24, "overlap_steps": 0}, 0.84),
    "K = 1": ("decoupled", {"grace_gamma": 0.0}, 1.0),
    "K = 1 with grace": ("decoupled", {}, 1.0),
    "K = M, tau = 2": ("streaming", {"num_fragments": 24, "sync_every_steps": 24, "overlap_steps": 2}, None),
    "K = M, free pace": ("decoupled", {"quorum": 8, "max_lead_steps": 2}, None),
}
"""Row -> (method whose pace it is, policy, published). The paper's K = M waits for everybody's step of that
number: lockstep. In free pace K = M hardly waits (docs/results/heterogeneous.md); the last two rows are ours."""


def table5(effort: Effort = USUAL) -> Iterator[Cell]:
    """Unequal learners, no failures: 8, one 18 % slower, every step with 10 % of noise."""
    calm = Cluster(chips=8, mtbi_s=math.inf)
    for row, (method, options, value) in TABLE5_ROWS.items():
        scenario = Scenario(
            method=method, learners=8, cluster=calm, policy=policy_of(method, options), slowest=UNEVEN,
            jitter=INJECTED,
        )  # fmt: skip
        outcome = simulate(scenario, effort)
        yield {
            "method": row, "learners": 8, "chips": 8, "goodput": outcome.goodput.mean,
            "goodput_ci": finite(outcome.goodput.interval), "uptime": outcome.uptime.mean, "published": value,
            "merge_breadth": outcome.merge_breadth.mean, "merged_share": outcome.merged_share.mean,
        }  # fmt: skip


# ---- table 4 -------------------------------------------------------------------------------------------


def table4(effort: Effort = USUAL) -> Iterator[Cell]:
    """Scavenging: time to the same tokens, relative, if more compute is there for a part of them.

    ``T = 1 - s + s / (1 + extra)``; data-parallel training stands for ``r`` more, whenever it changes its size.
    Two parameters, `EXTRA_SHARE` s and `RESHARDING` r. Nothing in it is drawn: `effort` changes nothing.
    """
    for method, values in published.TABLE4.items():
        for extra, value in zip(published.EXTRA, values, strict=True):
            stands = RESHARDING if method == "data_parallel" else 0.0
            time = 1 - EXTRA_SHARE + EXTRA_SHARE / (1 + extra) + stands
            yield {"method": method, "learners": 4, "extra": extra, "time": time, "published": value}


# ---- bandwidth -----------------------------------------------------------------------------------------


def bandwidth(effort: Effort = USUAL) -> Iterator[Cell]:
    """Streaming DiLoCo's table 4: Gbit/s needed for a compute utilisation. Nothing in it is drawn."""
    for (size, method), values in published.BANDWIDTH.items():
        params, layers, step_s = published.BANDWIDTH_MODELS[size]
        model = Model(params=params, layers=layers, step_s=step_s)
        found = needed_gbps(model, _sync(method, layers), published.UTILISATIONS, GRID)
        for target, gbps, value in zip(published.UTILISATIONS, found, values, strict=True):
            off = None if gbps is None else _on_grid(gbps) - _on_grid(value)
            yield {
                "model": size, "method": method, "utilisation": target, "gbps": gbps, "published": value,
                "grid_steps_off": off,
            }  # fmt: skip


def _sync(method: str, layers: int) -> Sync:
    if method == "data_parallel":
        return Sync(bits=WIRE_BITS)
    if method == "diloco":
        return Sync(every_steps=CYCLE_STEPS, bits=WIRE_BITS)
    return Sync(
        every_steps=CYCLE_STEPS, fragments=layers // LAYERS_A_FRAGMENT,
        overlap_steps=OVERLAP_STEPS if "overlap" in method else 0,
        bits=WIRE_BITS / 4 if "4 bit" in method else WIRE_BITS,
    )  # fmt: skip


def _on_grid(gbps: float) -> int:
    """The nearest step of the grid: published values are rounded."""
    return int(np.argmin(np.abs(np.log(GRID / gbps))))


PRESETS: dict[str, Callable[[Effort], Iterator[Cell]]] = {
    "table1": table1,
    "table1_correlated": table1_correlated,
    "table1_gasloc": table1_gasloc,
    "table4": table4,
    "table5": table5,
    "bandwidth": bandwidth,
}


def preset(name: str) -> Callable[[Effort], Iterator[Cell]]:
    """A preset by name.

    Raises:
        UserError: it does not exist.
    """
    if name not in PRESETS:
        raise UserError(f"simulate has no preset {name!r}{did_you_mean(name, PRESETS)}")
    return PRESETS[name]
