"""All measurements by name; run some or all of them, and show what came out."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from farflung.bench.codecs import MEASURED, measure_dct, measure_decode, measure_encode
from farflung.bench.lab import crowd, measure_lab
from farflung.bench.machines import measure_machines
from farflung.bench.measure import Measurement, Settings
from farflung.bench.merges import measure_merge
from farflung.bench.peak import measure_peak
from farflung.bench.simulation import measure_chips, measure_table1
from farflung.bench.throughput import measure_learner
from farflung.bench.transport import measure_get, measure_put
from farflung.errors import UserError, did_you_mean

REGISTRY: dict[str, Callable[[Settings], Measurement]] = {
    "learner_throughput": measure_learner,
    "merge_avg": partial(measure_merge, rule="avg"),
    "merge_rda": partial(measure_merge, rule="rda"),
    **{f"codec_{name}_encode": partial(measure_encode, name=name) for name in MEASURED},
    **{f"codec_{name}_decode": partial(measure_decode, name=name) for name in MEASURED},
    "dct": measure_dct,
    "codec_memory": measure_peak,
    "transport_put": measure_put,
    "transport_get": measure_get,
    "machine_events": measure_machines,
    "lab_overhead": measure_lab,
    "lab_crowd": partial(measure_lab, make_job=crowd),
    "simulate_table1": measure_table1,
    "simulate_chips": measure_chips,
}
"""Name on the command line and in the JSON object -> measurement."""


def chosen(names: Sequence[str]) -> list[str]:
    """The measurements that these names choose; no name chooses all.

    Raises:
        UserError: a name is unknown.
    """
    for name in names:
        if name not in REGISTRY:
            raise UserError(f"bench has no measurement {name!r}{did_you_mean(name, REGISTRY)}")
    return [name for name in REGISTRY if name in names] if names else list(REGISTRY)


def measure(name: str, settings: Settings) -> Measurement:
    """Take one measurement, with the settings' number of torch threads."""
    with _threads(settings.threads):
        return REGISTRY[name](settings)


def as_json(measured: Mapping[str, Measurement], settings: Settings) -> dict[str, Any]:
    """Ratios at the top, everything else under ``meta``."""
    return {
        **{name: m.ratio for name, m in measured.items()},
        "meta": {
            "threads": settings.threads,
            "torch": torch.__version__,
            "repetitions": {name: len(m.ratios) for name, m in measured.items()},
            "spread": {name: [m.low, m.high] for name, m in measured.items()},
            "aim": {name: m.aim for name, m in measured.items()},
            "reference": {name: f"{m.reference:.3g} {m.unit}" for name, m in measured.items()},
            "note": {name: m.note for name, m in measured.items()},
        },
    }


def table(measured: Mapping[str, Measurement], settings: Settings) -> Table:
    """The same for people."""
    caption = (
        f"Each ratio is ours / reference, measured in turns; median of the repetitions, {settings.threads} "
        "torch thread(s). Reference: what this machine does plainly (memory copy, socket, bare loop). More is "
        "better, but for lab_* and simulate_*, which compare times, and codec_memory."
    )
    out = Table(box=None, padding=(0, 2, 1, 0), header_style="dim", caption=caption, caption_justify="left")
    out.add_column("measurement")
    for heading in ("ratio", "aim", "min .. max", "reference"):
        out.add_column(heading, justify="right", no_wrap=True)
    for name, m in measured.items():
        meaning = f"{m.what} ({m.note})" if m.note else m.what
        out.add_row(
            Text.assemble((name, "bold"), "\n", (meaning, "dim")),
            Text(f"{m.ratio:.3f}", style="yellow" if m.missed else ""),
            "–" if m.aim is None else f"{'≤ ' if m.less_is_better else ''}{m.aim:g}",
            f"{m.low:.2f} .. {m.high:.2f}",
            f"{_short(m.reference)} {m.unit}",
        )
    return out


def _short(number: float) -> str:
    """Three digits, never an exponent.

    >>> _short(6312.7), _short(3.456)
    ('6310', '3.46')
    """
    digits = max(0, 2 - math.floor(math.log10(number)))
    return f"{round(number, 2 - math.floor(math.log10(number))):.{digits}f}"


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
