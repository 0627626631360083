"""The figures of a run: pure functions of its history. All fractions are 0..1."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from farflung.report import spans
from farflung.report.history import History, Interval, Merged, median
from farflung.report.meetings import usual_round_s


@dataclass(frozen=True, kw_only=True)
class Figures:
    """goodput, uptime: see the functions. Byte counts are those of objects that the tape names.

    Gossip: a merge is a learner's round that ended, its breadth the learners that were mixed in it.
    """

    num_learners: int
    quorum: int
    duration_s: float
    steps: int
    steps_of: dict[str, int]
    tokens_of: dict[str, int]
    goodput: float
    uptime: float
    merges: int
    mean_merge_breadth: float
    narrow_merges: int
    median_merge_gap_s: float
    largest_merge_gap_s: float
    kills: int
    rejoins: int
    rejoins_own_state: int
    rejoins_zero_state: int
    zero_state_reasons: dict[str, int]
    refused: dict[str, int]
    clipped: int  # contributions that were cut down before a merge
    waits: dict[str, int]
    alarms: dict[str, int]
    bytes_up: int
    bytes_down: int


def figures(history: History) -> Figures:
    return Figures(
        num_learners=history.num_learners,
        quorum=quorum(history),
        duration_s=history.end_s - history.start_s,
        steps=sum(len(s) for s in history.steps.values()),
        steps_of={name: len(history.steps.get(name, [])) for name in history.learners},
        tokens_of={name: sum(s.tokens for s in history.steps.get(name, [])) for name in history.learners},
        goodput=goodput(history),
        uptime=uptime(history),
        merges=len(history.merges),
        mean_merge_breadth=mean_breadth(history.merges),
        narrow_merges=narrow(history.merges),
        median_merge_gap_s=usual_merge_gap_s(history),
        largest_merge_gap_s=_length(largest_merge_gap(history)),
        kills=sum(m.get("fault") == "kill" for m in history.faults),
        rejoins=len(history.of_kind("rejoined")),
        rejoins_own_state=sum(n.data["taken"] == "own" for n in history.of_kind("own_state")),
        rejoins_zero_state=sum(_zero_states(history).values()),
        zero_state_reasons=_zero_states(history),
        refused=_count(history, "refused"),
        clipped=sum(len(n.data["scales"]) for n in history.of_kind("clipped")),
        waits=_count(history, "waiting"),
        alarms=_count(history, "alarm", "what"),
        bytes_up=sum(x.up for x in history.transfers),
        bytes_down=sum(x.down for x in history.transfers),
    )


def quorum(history: History) -> int:
    """K in learners: the policy's quorum, where "all" means every learner of the run; 1 in gossip."""
    if history.gossip is not None:
        return 1
    k = history.policy.get("quorum", 1)
    return history.num_learners if k == "all" else int(k)


def goodput(history: History) -> float:
    """Time that learners spent in steps / (num_learners x duration). Waits, freezes, downtime do not count.

    The duration runs from the start of the first step to the end of the run.
    """
    available = history.num_learners * (history.end_s - history.start_s)
    busy = sum(b - a for name in history.steps for a, b in spans.step_intervals(history, name))
    return min(1.0, busy / available) if available > 0 else 0.0


def uptime(history: History) -> float:
    """Share of the duration in which at least K learners trained.

    A learner also counts as training in gaps between its steps that are shorter than one own step.
    """
    training = [spans.training(history, name) for name in history.steps]
    return spans.share_with_at_least(quorum(history), training, history.start_s, history.end_s)


def mean_breadth(merges: Iterable[Merged]) -> float:
    """Mean number of contributors; 0 without merges."""
    breadths = [m.breadth for m in merges]
    return sum(breadths) / len(breadths) if breadths else 0.0


def narrow(merges: Iterable[Merged]) -> int:
    """Merges with one contributor while more learners were live (P16). Gossip: rounds that missed all partners."""
    return sum(m.breadth <= 1 < m.live for m in merges)


def merge_gaps(history: History) -> list[Interval]:
    """The times between merges that follow each other; the plain average at the end does not count."""
    times = [m.t for m in history.merges if not m.final]
    return list(pairwise(times))


def usual_merge_gap_s(history: History) -> float:
    """Median time between merges; gossip: between the ends of a learner's rounds."""
    if history.gossip is not None:
        return usual_round_s(history.gossip)
    return median(b - a for a, b in merge_gaps(history))


def largest_merge_gap(history: History) -> Interval | None:
    """The longest time without a merge, counting from the last merge to the end of the last step too."""
    gaps = merge_gaps(history)
    times = [m.t for m in history.merges if not m.final]
    if times and history.last_step_s > times[-1]:
        gaps.append((times[-1], history.last_step_s))
    return max(gaps, key=lambda gap: gap[1] - gap[0], default=None)


def _length(interval: Interval | None) -> float:
    return interval[1] - interval[0] if interval else 0.0


def _zero_states(history: History) -> dict[str, int]:
    """Installations of a returned learner whose own method state began at zero, by the reason."""
    reasons = Counter(n.data["reason"] for n in history.of_kind("own_state") if n.data["taken"] == "zero")
    return dict(sorted(reasons.items()))


def _count(history: History, kind: str, key: str = "reason") -> dict[str, int]:
    counts = Counter(str(n.data.get(key, "?")) for n in history.of_kind(kind))
    return dict(sorted(counts.items()))
