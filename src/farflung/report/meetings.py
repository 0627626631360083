"""Figures of a gossip run: who met whom, who missed whom, and how far apart the learners were."""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from farflung.report import spans
from farflung.report.gossip import EndedRound, Gossip
from farflung.report.history import Data, History, median, natural

Outcome = Literal["mixed", "half", "missed"]


@dataclass(frozen=True)
class Meeting:
    """Two partners of one round, as far as they told of it: one meeting, whether one or both did.

    mixed: nobody missed the other. half: one side mixed, the other did not. missed: neither mixed; `reason` is
    the first that was given, for later ones follow from it.
    """

    t: float
    pair: tuple[str, str]
    outcome: Outcome
    reason: str


def meetings(gossip: Gossip) -> list[Meeting]:
    """Every meeting of a run, by the time at which the first side told of it."""
    told: dict[tuple[int, int, str, str], list[tuple[float, str]]] = {}
    for end in gossip.rounds:
        for side in end.sides:
            a, b = sorted((end.learner, side.partner), key=natural)
            told.setdefault((end.epoch, end.round, a, b), []).append((end.t, side.missed))
    return [_meeting((a, b), sides) for (_, _, a, b), sides in told.items()]


def _meeting(pair: tuple[str, str], sides: list[tuple[float, str]]) -> Meeting:
    reasons = [missed for _, missed in sides if missed]
    outcome: Outcome = "mixed" if not reasons else "missed" if len(reasons) == len(sides) else "half"
    return Meeting(sides[0][0], pair, outcome, reasons[0] if reasons else "")


def missed_by_reason(found: list[Meeting]) -> dict[str, int]:
    """How many meetings came to nothing, by reason."""
    return dict(sorted(Counter(m.reason for m in found if m.outcome == "missed").items()))


def longest_wait_s(history: History, learner: str | None = None) -> float:
    """The longest wait for partners at a round's end, of one learner or of all; planned freezes left out.

    Both what learners' tapes say and what their trainers reported: either may be lacking.
    """
    gossip = history.gossip or Gossip()
    waits = [(s.learner, (s.start_s, s.end_s)) for s in gossip.stands if s.ended]
    waits += [(end.learner, (end.t - end.wait_s, end.t)) for end in gossip.rounds]
    return max(
        (
            high - low - spans.overlap_s((low, high), spans.frozen(history, name))
            for name, (low, high) in waits
            if learner in (None, name)
        ),
        default=0.0,
    )


def usual_round_s(gossip: Gossip) -> float:
    """Median time from the end of a learner's round to the end of its next."""
    own: dict[str, list[EndedRound]] = {}
    for end in gossip.rounds:
        own.setdefault(end.learner, []).append(end)
    return median(b.t - a.t for ends in own.values() for a, b in pairwise(ends))


def gossip_summary(history: History, gossip: Gossip) -> Data:
    """What summary.json says of a gossip run and of no other.

    meetings: of pairs, not of sides; total = mixed + half_exchanges + the sum of missed, which is by reason.
    half_exchange_drift: sum of ||move of the mean|| over half exchanges, so at most so far did it move.
    consensus_distance: mean squared distance of learners from their average, at the last average;
    consensus_distances: at each. workers_loss: of each learner's own parameters at the end.
    longest_wait_s: for partners at a round's end; longest_deadline_s: that a learner set itself for that.
    bytes_per_exchange: of a vector, which goes each way; bytes_between_partners: of all vectors, each once, the
    part of bytes_up that is training. The rest of it goes to the hub, for averages and for who joins.
    """
    found = meetings(gossip)
    outcomes = Counter(m.outcome for m in found)
    drifts = [float(n.data.get("drift") or 0.0) for n in history.of_kind("half_exchange")]
    return {
        "topology": "gossip",
        "epochs": len(history.of_kind("epoch")),
        "meetings": {"total": len(found), "mixed": outcomes["mixed"], "missed": missed_by_reason(found)},
        "half_exchanges": outcomes["half"],
        "half_exchange_drift": sum(drifts, 0.0),
        "consensus_distance": gossip.averages[-1].distance if gossip.averages else None,
        "consensus_distances": [
            {"t": a.t, "version": a.version, "round": a.round, "learners": len(a.learners), "distance": a.distance}
            for a in gossip.averages
        ],
        "workers_loss": workers_loss(history),
        "longest_wait_s": longest_wait_s(history),
        "longest_deadline_s": max((s.patience_s for s in gossip.stands), default=None),
        "bytes_per_exchange": gossip.vector_bytes,
        "bytes_between_partners": sum(x.up for x in gossip.moved),
    }  # fmt: skip


def workers_loss(history: History) -> Data | None:
    """Mean, min and max over learners of the loss of their own parameters; None if it was not evaluated."""
    losses = list(own_losses(history).values())
    if not losses:
        return None
    return {"mean": sum(losses) / len(losses), "min": min(losses), "max": max(losses)}


def own_losses(history: History) -> dict[str, float]:
    """The loss of each learner's own parameters, as last evaluated."""
    evaluated = [e["workers"] for e in history.evals if e.get("workers")]
    return {name: loss for name, loss in evaluated[-1].items() if loss is not None} if evaluated else {}
