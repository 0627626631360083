"""What a real run was given and what befell it: all that a prediction may know, and nothing that it predicts.

Given: recipe and policy. Befell it: when each learner came, faults at their moments, how long a killed learner's
machine took until its new process knocked. Measured: a step's time and its spread, the time between two steps, a
merge. Not taken: rounds, contributions, bytes, waits, durations.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import msgspec

from farflung import tape
from farflung.chaos.plan import FIELDS, Fault
from farflung.config import RunConfig, read_config
from farflung.errors import UserError
from farflung.lab.task_body import task_plan
from farflung.report.folder import read_folder
from farflung.report.gossip import learner_of
from farflung.report.history import Data, History, Step, median

OBJECT_S = 0.003  # on an idle machine, some 20 kB: in births, 18 ms for six up, 7 ms for six down
NEVER_S = 1e9  # a killed learner that was not back when the run began to end


@dataclass(frozen=True, kw_only=True)
class Pace:
    """A learner's steps.

    Attributes:
        step_s: mean seconds of a step.
        spread: relative standard deviation of that.
        between_s: mean seconds from a step's end to the next one's start where it did not wait: the boundary.
        starts_s: when it joined first, seconds after the first learner.
    """

    step_s: float
    spread: float
    between_s: float
    starts_s: float

    @property
    def cycle_s(self) -> float:
        """From step to step."""
        return self.step_s + self.between_s


@dataclass(frozen=True, kw_only=True)
class Past:
    """A run as a prediction may know it.

    Attributes:
        config: as in config.json.
        paces: of each learner.
        faults: as they happened, `at_s` in seconds after the end of the first step.
        away_s: of each killed learner, kill after kill: until its new process knocked at the syncer.
        merge_s: median of a merge.
        last_merges_s: of each merge at the end, which begin together, the shortest first.
        not_predicted: what befell the run and is not rehearsed, one line each.
        object_s: of a bulk object beside its bytes over the line: requests, hashing, processes that take turns.
    """

    config: RunConfig
    paces: dict[str, Pace]
    faults: list[Fault]
    away_s: dict[str, list[float]]
    merge_s: float
    last_merges_s: list[float]
    object_s: float
    not_predicted: list[str]


def read_past(run_dir: Path) -> Past:
    """Read a finished run.

    Raises:
        UserError: not a run folder, nothing was trained in it, or it was resumed.
    """
    config, folder = read_config(run_dir), read_folder(run_dir)
    history = folder.history
    if not any(history.steps.values()):
        raise UserError(f"{run_dir}: nobody trained in this run: there is nothing to predict")
    if folder.summary.get("outcome", history.end_reason) != "finished":
        raise UserError(f"{run_dir}: this run did not finish: only a finished one can be compared")
    records = list(tape.read_run(run_dir))
    if not trains_its_task(config, records):
        raise UserError(
            f"{run_dir}: its learners brought a model of their own: only runs of a recipe's task can be rehearsed"
        )
    joins = _joins(records)
    return Past(
        config=config, paces=_paces(config.recipe.learners(), history, joins),
        faults=list(_faults(history)), away_s=_away(history, joins), merge_s=_merge_s(records),
        last_merges_s=_last_merges_s(records),
        object_s=_object_s(records, history), not_predicted=list(_not_predicted(history)),
    )  # fmt: skip


def trains_its_task(config: RunConfig, records: Iterable[tape.Record]) -> bool:
    """Whether the first learner that knocked has the model of the recipe's task, in the same fragments."""
    said = next((
        record.data["message"]["fingerprint"] for record in records
        if record.type == "MessageArrived" and record.data["message"]["type"] == "Join"
    ), None)  # fmt: skip
    try:
        return said is None or said == task_plan(config, config.task()).fingerprint()
    except ValueError:  # the task's model has not so many fragments
        return False


def _joins(records: Iterable[tape.Record]) -> dict[str, list[float]]:
    """When each learner knocked at the syncer, again and again."""
    found: dict[str, list[float]] = {}
    for record in records:
        if record.type == "MessageArrived" and record.data["message"]["type"] == "Join":
            found.setdefault(record.data["message"]["learner"], []).append(record.t)
    return found


def _paces(names: list[str], history: History, joins: dict[str, list[float]]) -> dict[str, Pace]:
    first_s = min(times[0] for times in joins.values())
    known = {
        name: pace_of(steps, history.waits.get(name, [])) for name, steps in history.steps.items() if steps
    }
    usual = (fmean(p[0] for p in known.values()), 0.0, fmean(p[2] for p in known.values()))
    found = {}
    for name in names:
        step_s, spread, between_s = known.get(name, usual)
        starts_s = joins[name][0] - first_s if name in joins else 0.0
        found[name] = Pace(step_s=step_s, spread=spread, between_s=between_s, starts_s=starts_s)
    return found


def pace_of(steps: list[Step], waits: list[tuple[float, float]]) -> tuple[float, float, float]:
    """(mean, relative spread, seconds between) of a learner's steps.

    What lasts longer than a step is a standstill; a wait between two steps is not the boundary's work either.

    >>> steps = [Step(t, t + 0.5, 1, None, 0) for t in (0.0, 0.6, 1.2, 5.0)]
    >>> [round(x, 3) for x in pace_of(steps, [(0.5, 0.55)])]
    [0.5, 0.0, 0.075]
    """
    lengths = [s.end_s - s.start_s for s in steps]
    step_s = fmean(lengths)
    gaps = []
    for before, after in pairwise(steps):
        low, high = before.end_s, after.start_s
        waited = sum(max(0.0, min(high, b) - max(low, a)) for a, b in waits if b > low and a < high)
        if high - low - waited <= step_s:
            gaps.append(max(0.0, high - low - waited))
    return step_s, pstdev(lengths) / step_s, fmean(gaps) if gaps else 0.0


def _faults(history: History) -> Iterable[Fault]:
    """What happened, at its moment after the end of the first step."""
    began_s = min(steps[0].end_s for steps in history.steps.values() if steps)
    for record in history.faults:
        yield _fault(record, max(0.0, float(record["t"]) - began_s))


def _fault(record: Data, at_s: float) -> Fault:
    kind = record["fault"]
    fields = {name: record[name] for name in FIELDS[kind] if record.get(name) is not None}
    return msgspec.convert({"kind": kind, "target": record["target"], "at_s": at_s, **fields}, Fault)


def _away(history: History, joins: dict[str, list[float]]) -> dict[str, list[float]]:
    """From each kill to the next knock of the same learner; who knocks when the run is ending comes too late."""
    found: dict[str, list[float]] = {}
    ending_s = min((note.t for note in history.of_kind("ending")), default=history.end_s)
    for record in history.faults:
        if record["fault"] == "kill":
            name, at_s = record["target"], float(record["t"])
            back_s = next((t for t in joins.get(name, []) if at_s < t < ending_s), NEVER_S)
            found.setdefault(name, []).append(back_s - at_s)
    return found


def _not_predicted(history: History) -> Iterable[str]:
    """Learners that left, or whose process died without a planned kill, before the run was ending."""
    ending_s = min((note.t for note in history.of_kind("ending")), default=history.end_s)
    kills = [(r["target"], float(r["t"])) for r in history.faults if r["fault"] == "kill"]
    for note in sorted([*history.of_kind("left"), *history.of_kind("lost")], key=lambda note: note.t):
        own = [kill for kill in kills if kill[0] == note.learner and kill[1] <= note.t]
        if own and note.kind == "lost":
            kills.remove(own[0])
        elif note.t < ending_s:
            how = "left" if note.kind == "left" else "was lost"
            yield f"{note.learner} {how} at {note.t:.1f} s: not part of the prediction"


def _merge_s(records: Iterable[tape.Record]) -> float:
    return median(record.data["merge_s"] for record in records if record.type == "MergeDone")


def _last_merges_s(records: Iterable[tape.Record]) -> list[float]:
    """From the order to the end of each merge that takes what was handed in."""
    begun: dict[int, float] = {}
    found: list[float] = []
    for record in records:
        if record.type == "Merge" and record.data.get("final"):
            begun[record.data["fragment"]] = record.t
        elif record.type == "MergeDone" and record.data["fragment"] in begun:
            found.append(record.t - begun.pop(record.data["fragment"]))
    return sorted(found)


def _object_s(records: Iterable[tape.Record], history: History) -> float:
    """Median over uploads of what they took beside bytes / bandwidth; who began behind another is left out."""
    on_way: dict[
        str, dict[str, tuple[float, float] | None]
    ] = {}  # node -> object -> since, of which on the line
    own_s: list[float] = []
    for record in records:
        name, own = str(record.data.get("object", "")), on_way.setdefault(record.node, {})
        if record.type in ("Upload", "Offer") and name.startswith(("contribution.", "offer.")):
            ends = {learner_of(record.node), record.data.get("partner") or learner_of(record.node)}
            bps = min(_bps(history, end, record.t) for end in ends)
            own[name] = None if own else (record.t, 8 * record.data["num_bytes"] / bps)
        elif record.type in ("Uploaded", "UploadFailed", "CancelUpload"):
            begun = own.pop(name, None)
            if begun is not None and record.type == "Uploaded":
                own_s.append(max(0.0, record.t - begun[0] - begun[1]))
    return median(own_s) if own_s else OBJECT_S


def _bps(history: History, learner: str, at_s: float) -> float:
    """What throttles left of a learner's line at a moment."""
    return min(
        (
            1e6 * float(fault["mbps"])
            for fault in history.faults
            if fault["fault"] == "throttle" and fault["target"] == learner
            and float(fault["t"]) <= at_s < float(fault["t"]) + float(fault["for_s"])
        ),
        default=float("inf"),
    )  # fmt: skip
