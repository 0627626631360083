"""What a page says of a gossip run in its own words: partners, missed meetings, learners."""

from collections import Counter

from farflung.report import partners, spans
from farflung.report.gossip import Gossip
from farflung.report.history import History
from farflung.report.markup import Html, figure, table, tag
from farflung.report.meetings import longest_wait_s, meetings, own_losses
from farflung.report.pictures import Frame
from farflung.report.wording import num_bytes, percent, seconds, short

TIMELINE = (
    "Time in which a learner trained is solid, thin where it waited for partners. "
    "Below: one mark for every round that a learner ended."
)
CONSENSUS = (
    "Mean squared distance of learners from their average, at each average. "
    "Dots: half the squared distance of two that met."
)
WHO_MET = "Above the diagonal: how often two mixed. Below: how often one or both missed the other."
TRAFFIC = (
    "Payload so far, all learners: vectors from partner to partner; parameters to the hub, for averages, "
    "and from it, for who joins."
)
LEDGER = "A learner's work counts as merged when its round ends: then it is in parameters that others meet."

MISSED = {
    "deadline": "it had not come, or had not answered, when the wait for it ended",
    "late": "its round had ended before ours was offered",
    "lost": "it left the epoch while it was waited for",
    "unreachable": "neither directly nor through the hub",
    "not_finite": "its vector was not finite",
    "stranger": "it knew of no such meeting",
    "gone": "its vector was gone from the hub",
}


def pictures(h: History, frame: Frame, name: str) -> Html:
    drawn = [
        figure(partners.consensus(h, frame, name), CONSENSUS),
        figure(partners.traffic(h, frame, name), TRAFFIC),
        figure(partners.who_met(h, frame, name), WHO_MET),
        tag("div", *missed(h)),
    ]
    return tag("div", *drawn, cls="pair")


def missed(h: History) -> list[object]:
    """Why meetings came to nothing, and how long learners waited."""
    gossip = h.gossip or Gossip()
    found = meetings(gossip)
    counts = Counter(m.reason for m in found if m.outcome == "missed")
    half = sum(m.outcome == "half" for m in found)
    rows = [(reason.replace("_", " "), MISSED.get(reason, ""), n) for reason, n in counts.most_common()]
    if half:
        rows.append(("half exchange", "one side mixed, the other did not", half))
    out: list[object] = [
        table(["missed", "why", "times"], rows, cls="words") if rows else _muted("No meeting was missed.")
    ]
    deadline = max((s.patience_s for s in gossip.stands), default=None)
    if deadline is not None:
        wait = f"The longest wait for partners was {seconds(longest_wait_s(h))}"
        out.append(_muted(f"{wait}; nobody would have waited longer than {seconds(deadline)}."))
    if gossip.vector_bytes is not None:
        out.append(_muted(f"In an exchange each sends the other {num_bytes(gossip.vector_bytes)}."))
    return out


def _muted(text: str) -> Html:
    return tag("p", text, cls="muted")


def learners(h: History) -> Html:
    head = ["learner", "steps", "tokens", "training", "rounds", "met", "missed", "longest wait", "lost",
            "incarnation", "last loss", "own at end", "up", "down"]  # fmt: skip
    return table(head, [_learner(h, name) for name in h.learners])


def _learner(h: History, name: str) -> list[object]:
    steps = h.steps.get(name, [])
    duration = h.end_s - h.start_s
    busy = sum(b - a for a, b in spans.step_intervals(h, name))
    own = [r for r in (h.gossip or Gossip()).rounds if r.learner == name]
    joined = [n.data.get("incarnation") for n in h.of_kind("joined") if n.learner == name]
    met = sum(len(r.met) for r in own)
    return [
        name,
        len(steps),
        short(sum(s.tokens for s in steps)),
        percent(busy / duration) if duration else "–",
        len(own),
        met,
        sum(len(r.sides) for r in own) - met,
        seconds(longest_wait_s(h, name)),
        sum(n.learner == name for n in h.of_kind("lost")),
        joined[-1] if joined else "–",
        _loss(next((s.loss for s in reversed(steps) if s.loss is not None), None)),
        _loss(own_losses(h).get(name)),
        num_bytes(sum(x.up for x in h.transfers if x.learner == name)),
        num_bytes(sum(x.down for x in h.transfers if x.learner == name)),
    ]


def _loss(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.3f}"
