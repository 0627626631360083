"""A finished run beside its prediction: figure by figure, predicted, measured, difference."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from farflung.plan.past import Past, read_past
from farflung.plan.rehearsal import Rehearsal
from farflung.report.folder import read_folder
from farflung.report.history import Data, History, median
from farflung.report.summary import summary_of

BYTES_WITHIN, TIMES_WITHIN = 0.03, 0.10
"""How far a prediction may be off, relative: what is promised of bytes, and of goodput and times."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of a run, predicted and measured.

    Attributes:
        name: of it.
        predicted, measured: in `unit`; shares are 0..1.
        unit: bytes, s, share, or nothing for a count.
        within: how far off it may be, relative; None: nothing is promised of it.
    """

    name: str
    predicted: float
    measured: float
    unit: str
    within: float | None

    @property
    def off(self) -> float | None:
        """predicted / measured - 1; None where nothing was measured."""
        return self.predicted / self.measured - 1 if self.measured else None

    @property
    def holds(self) -> bool | None:
        """Whether it is as near as promised; None: nothing is promised."""
        if self.within is None:
            return None
        return abs(self.predicted - self.measured) <= self.within * abs(self.measured)


FIGURES: dict[str, tuple[str, float | None]] = {
    "bytes_up": ("bytes", BYTES_WITHIN),
    "bytes_down": ("bytes", BYTES_WITHIN),
    "goodput": ("share", TIMES_WITHIN),
    "round_interval_s": ("s", TIMES_WITHIN),
    "round_s": ("s", TIMES_WITHIN),
    "duration_s": ("s", TIMES_WITHIN),
    "merges": ("", None),
    "breadth": ("", None),
    "uptime": ("share", None),
}
"""name -> (unit, how near it should be). docs/plan.md says what each is."""


def check(run_dir: Path, past: Past | None = None) -> list[Figure]:
    """Predict a finished run from what it was given and what befell it, and compare.

    `past` is given where it was read before.

    Raises:
        UserError: see `read_past`.
    """
    past = past or read_past(run_dir)
    folder = read_folder(run_dir)
    measured = figures_of(folder.summary or summary_of(folder), folder.history)
    predicted = predict(past)
    return [
        Figure(name=name, predicted=predicted[name], measured=measured[name], unit=unit, within=within)
        for name, (unit, within) in FIGURES.items()
        if name in predicted and name in measured
    ]


def predict(past: Past) -> dict[str, float]:
    """The figures of a run, before it: from its past alone."""
    with tempfile.TemporaryDirectory() as folder:
        rehearsal = Rehearsal(past, Path(folder))
        summary = rehearsal.go()
        found = figures_of(summary, read_folder(Path(folder)).history)
    in_steps = sum(p.step_s for p in past.paces.values()) / sum(p.cycle_s for p in past.paces.values())
    return found | {"goodput": found["goodput"] * in_steps}


def figures_of(summary: Data, history: History) -> dict[str, float]:
    """The same figures from a real run's records and from a rehearsal's."""
    rounds = round_lengths_s(history)
    found = {
        "bytes_up": summary["bytes_up"], "bytes_down": summary["bytes_down"], "goodput": summary["goodput"],
        "round_interval_s": summary["median_merge_gap_s"], "duration_s": summary["duration_s"],
        "merges": summary["merges"], "breadth": summary["mean_merge_breadth"], "uptime": summary["uptime"],
    }  # fmt: skip
    return found | ({"round_s": median(rounds)} if rounds and history.gossip is None else {})


def round_lengths_s(history: History) -> list[float]:
    """From each round's opening to its merge; hub methods, without the merge at the end."""
    opened: dict[tuple[int, int], float] = {}
    for note in history.of_kind("round_open"):
        opened.setdefault((note.data["fragment"], note.data["round"]), note.t)
    return [
        merge.t - opened[merge.fragment, merge.version]
        for merge in history.merges
        if not merge.final and (merge.fragment, merge.version) in opened
    ]


def as_json(run_dir: Path, figures: list[Figure], not_predicted: Sequence[str] = ()) -> str:
    """One object."""
    rows = {
        f.name: {
            "predicted": f.predicted, "measured": f.measured, "off": f.off, "within": f.within, "holds": f.holds,
        }
        for f in figures
    }  # fmt: skip
    return json.dumps({"run": str(run_dir), "figures": rows, "not_predicted": list(not_predicted)})
