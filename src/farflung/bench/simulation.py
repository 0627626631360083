"""How long the simulator takes: for the paper's table against what we allow it, and for more chips.

Both ratios are of times, so less is better. The first has no reference that is measured: it is seconds over
`ALLOWED_S`. The second compares two clusters that fail equally often, one of a hundred times as many chips.
"""

import time
from itertools import islice

from farflung.bench.measure import Measurement, Settings, interleave
from farflung.simulate.cluster import YEAR_S, Cluster
from farflung.simulate.presets import table1
from farflung.simulate.scenario import Scenario
from farflung.simulate.simulating import Effort, simulate

ALLOWED_S = 180.0  # of table 1's 30 cells, each to 1 point, on two cores
CELLS = 30
SMALL_CHIPS, TIMES_CHIPS = 12_000, 100
AS_MANY_FAIL_AS = 1_200_000  # chips, each once a year, of both clusters
CHIPS_AIM = 1.2
LEARNERS = 8
NEVER = 1e-9  # a half-width that is not reached: all seeds are done


def measure_table1(settings: Settings) -> Measurement:
    """Seconds of the cells of table 1, one after the other in one process, over the share of `ALLOWED_S`."""
    allowed_s = ALLOWED_S * settings.simulate_cells / CELLS
    effort = Effort(half_width=settings.simulate_half_width)
    ratios, widest = [], 0.0
    for _ in range(settings.simulate_repetitions):
        began_s = time.perf_counter()
        cells = list(islice(table1(effort), settings.simulate_cells))
        ratios.append((time.perf_counter() - began_s) / allowed_s)
        widest = max((high - low) / 2 for low, high in (cell["goodput_ci"] for cell in cells))
    return Measurement(
        ratios=tuple(ratios),
        reference=allowed_s,
        unit="s, given",
        what="time of the cells of `simulate --preset table1`, over 3 minutes for all 30; less is better",
        aim=1.0,
        less_is_better=True,
        note=f"{len(cells)} cells in one process, half-widths at most {100 * widest:.2f} points",
    )


def measure_chips(settings: Settings) -> Measurement:
    """Time of a simulation with a hundred times the chips, at equally many failures."""
    _seconds(SMALL_CHIPS, settings)  # a warm-up
    ratios, took_s = interleave(
        lambda: _seconds(SMALL_CHIPS * TIMES_CHIPS, settings),
        lambda: _seconds(SMALL_CHIPS, settings),
        settings.simulate_repetitions,
    )
    return Measurement(
        ratios=ratios,
        reference=took_s,
        unit="s",
        what=f"time of a simulation with {TIMES_CHIPS} times the chips, over the time with the small number, both "
        "with the same number of failures; less is better",
        aim=CHIPS_AIM,
        less_is_better=True,
        note=f"decoupled, {LEARNERS} learners, {SMALL_CHIPS * TIMES_CHIPS} chips against {SMALL_CHIPS}, "
        f"{settings.simulate_seeds} seeds",
    )


def _seconds(chips: int, settings: Settings) -> float:
    cluster = Cluster(chips=chips, mtbi_s=YEAR_S * chips / AS_MANY_FAIL_AS)
    scenario = Scenario(method="decoupled", learners=LEARNERS, cluster=cluster)
    began_s = time.perf_counter()
    simulate(scenario, Effort(half_width=NEVER, max_seeds=settings.simulate_seeds))
    return time.perf_counter() - began_s
