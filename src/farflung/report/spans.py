"""Who was alive: each learner's time as joining, training, waiting, silent, dead."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from farflung.report.history import Data, History, Interval, Step, median

State = Literal["joining", "training", "waiting", "silent", "dead"]


@dataclass(frozen=True)
class Span:
    start_s: float
    end_s: float
    state: State


def union(intervals: Iterable[Interval], bridge_s: float = 0.0) -> list[Interval]:
    """Sorted, disjoint intervals; gaps of at most `bridge_s` are closed.

    >>> union([(0, 1), (1.2, 2), (5, 6)], bridge_s=0.5)
    [(0, 2), (5, 6)]
    """
    out: list[Interval] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1] + bridge_s:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def subtract(interval: Interval, holes: Sequence[Interval]) -> list[Interval]:
    """What is left of an interval outside of sorted, disjoint holes.

    >>> subtract((0, 10), [(2, 3), (9, 12)])
    [(0, 2), (3, 9)]
    """
    start, end = interval
    out = []
    for low, high in holes:
        if low > start and start < end:
            out.append((start, min(low, end)))
        start = max(start, high)
    return [*out, (start, end)] if start < end else out


def overlap_s(interval: Interval, others: Iterable[Interval]) -> float:
    """Seconds of an interval that lie in disjoint others."""
    return sum(max(0.0, min(interval[1], high) - max(interval[0], low)) for low, high in others)


def frozen(history: History, learner: str) -> list[Interval]:
    """Times in which the fault plan held this learner's processes stopped."""
    return union(
        (float(m["t"]), float(m["t"]) + float(m["for_s"]))
        for m in history.faults
        if m.get("fault") == "freeze" and m.get("target") == learner and m.get("for_s")
    )


def step_intervals(history: History, learner: str) -> list[Interval]:
    """The learner's steps [t - step_s, t], without the time in which it was frozen."""
    holes = frozen(history, learner)
    return [part for s in history.steps.get(learner, []) for part in subtract((s.start_s, s.end_s), holes)]


def training(history: History, learner: str) -> list[Interval]:
    """Steps joined over gaps shorter than one own (median) step."""
    return union(step_intervals(history, learner), bridge_s=_own_step_s(history.steps.get(learner, [])))


def alive(history: History, learner: str) -> list[Span]:
    """The learner's spans in time order, from its first join to its leave or the end of the run.

    A membership is cut into training and waiting as reported; before its first step the learner is joining,
    otherwise more than one own step without a report is silent (not after the last step of all). From a kill,
    exit or loss to the next admission it is dead, except for steps that it reports afterwards (a broken link,
    not a broken learner).
    """
    busy = training(history, learner)
    step_s = _own_step_s(history.steps.get(learner, []))
    holes = union([*busy, *frozen(history, learner)])
    waits = [w for wait in union(history.waits.get(learner, [])) for w in subtract(wait, holes)]
    known = union([*busy, *waits])
    spans = [Span(a, b, "training") for a, b in busy] + [Span(a, b, "waiting") for a, b in waits]
    for start, end, state in _memberships(history, learner):
        if state == "dead":
            spans += [Span(a, b, "dead") for a, b in subtract((start, end), known)]
            continue
        first = min((a for a, b in known if b > start), default=end)  # the first step here
        first = min(max(first, start), end)
        if first > start:
            spans.append(Span(start, first, "joining"))
        gaps = subtract((first, min(end, history.last_step_s)), known)
        spans += [Span(a, b, "silent") for a, b in gaps if b - a > step_s]
    return sorted((s for s in spans if s.end_s > s.start_s), key=lambda s: s.start_s)


def _memberships(history: History, learner: str) -> list[tuple[float, float, str]]:
    """(start, end, "member" or "dead") in time order: what fault plan, processes and syncer say."""
    states = {"joined": "member", "lost": "dead", "left": ""}
    changes = [(n.t, states[n.kind]) for n in history.notes if n.learner == learner and n.kind in states]
    changes += [(float(m["t"]), "dead") for m in history.metrics if _deadly(m, learner)]
    changes += [(t, "member") for t, name in history.welcomes if name == learner]  # after the loss it ends
    out: list[tuple[float, float, str]] = []
    state, since = "", 0.0
    for t, new in sorted(changes, key=lambda change: change[0]):
        if new == state or t > history.end_s or (new == "dead" and state == ""):
            continue
        out.append((since, t, state))
        state, since = new, t
    return [(a, b, x) for a, b, x in [*out, (since, history.end_s, state)] if x and b > a]


def _deadly(m: Data, learner: str) -> bool:
    killed = m.get("fault") == "kill" and m.get("target") == learner and m.get("what") != "sidecar"
    return killed or (m.get("event") == "exited" and m.get("learner") == learner)


def _own_step_s(steps: Sequence[Step]) -> float:
    return median(s.end_s - s.start_s for s in steps)


def share_with_at_least(k: int, spans: Iterable[Sequence[Interval]], start_s: float, end_s: float) -> float:
    """Share (0..1) of [start, end] in which at least k of the learners' interval lists are active.

    >>> share_with_at_least(2, [[(0, 10)], [(5, 10)]], 0, 10)
    0.5
    """
    if end_s <= start_s:
        return 0.0
    edges = []
    for intervals in spans:
        for low, high in union(intervals):
            low, high = max(low, start_s), min(high, end_s)
            if low < high:
                edges += [(low, 1), (high, -1)]
    active, since, total = 0, start_s, 0.0
    for t, change in sorted(edges):
        total += t - since if active >= k else 0.0
        active, since = active + change, t
    total += end_s - since if active >= k else 0.0
    return total / (end_s - start_s)
