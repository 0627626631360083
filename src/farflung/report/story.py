"""What happened, in words: one line an event that a person would tell, with its time."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from farflung.report.history import Data, History, Note, natural
from farflung.report.outages import Outage, outages
from farflung.report.wording import seconds

Tone = Literal["plain", "bad", "good", "warn"]

MAX_NAMES = 8  # learners, named one by one
MAX_HALF = 8  # half exchanges, told one by one
PROOFS = {
    "params_equal": ("parameters", "the syncer's"),
    "inner_equal": ("inner optimizer", "{donor}'s"),
    "lr_equal": ("learning rate", "{donor}'s"),
    "cursor_equal": ("data position", "its own as the syncer kept it"),
}


@dataclass(frozen=True)
class Line:
    t: float
    text: str
    tone: Tone = "plain"


def story(history: History) -> list[Line]:
    """Births, failures with their recoveries, departures, alarms and the end, by time."""
    lines = [
        *_births(history),
        *_late_joins(history),
        *_departures(history),
        *_alarms(history),
        *_end(history),
    ]
    lines += [*_epochs(history), *_half_exchanges(history)]
    for outage in outages(history):
        lines += outage_lines(history, outage)
    return sorted(lines, key=lambda line: line.t)


def outage_lines(history: History, o: Outage) -> list[Line]:
    """One failure from first cause to first merged contribution; each line says how long after the cause."""
    who = o.learner
    lines = [Line(o.began_s, f"{who}: {o.cause}", "bad")]

    def add(t: float | None, text: str, tone: Tone = "plain") -> None:
        if t is not None:
            after = f" ({seconds(t - o.began_s)} after)" if t > o.began_s else ""
            lines.append(Line(t, f"{who}: {text}{after}", tone))

    add(o.lapsed_s, "counted out by the syncer: lease lapsed", "warn")
    add(o.renewed_s, "heard again: lease renewed", "good")
    add(o.lost_s, f"given up by the syncer: {o.lost_reason or 'no reason given'}", "warn")
    add(o.restarted_s, "process started again")
    add(o.proved_s, _proof(o.proof, history.gossip is not None), "good" if proven(o.proof) else "bad")
    if o.role == "reattach":
        add(o.joined_s, f"reattached as incarnation {o.incarnation}, nothing lost", "good")
    else:
        add(o.joined_s, f"joined as incarnation {o.incarnation} ({o.role or 'join'})")
    first = "contribution merged" if history.gossip is None else "mix with a partner"
    add(o.merged_s, f"rejoined: first {first}", "good")
    if o.noticed_s is None and o.joined_s is None:
        add(_next_step(history, o), "its lease never lapsed; reported its next step", "good")
    return lines


def proven(proof: Data) -> bool:
    """Whether no digest differed. Digests that had no counterpart (cold start: no donor) are None."""
    return (
        bool(proof) and all(proof.get(key) is not False for key in PROOFS) and bool(proof.get("params_equal"))
    )


def _proof(proof: Data, gossip: bool) -> str:
    """What was compared by digest and with whom; differences first. Gossip: parameters are the donor's too."""
    donor = proof.get("donor")
    parts = []
    for key, (what, whose) in PROOFS.items():
        if (same := proof.get(key)) is not None and (donor or "{donor}" not in whose):
            whose = "{donor}'s" if gossip and donor and key == "params_equal" else whose
            parts.append((bool(same), f"{what} {'=' if same else '≠'} {whose.format(donor=donor)}"))
    verdict = "rejoin proved by digest" if proven(proof) else "rejoin NOT proved"
    cold = "" if donor else "; no donor: inner optimizer starts cold"
    return f"{verdict}: {', '.join(text for _, text in sorted(parts, key=lambda p: p[0]))}{cold}"


def _next_step(history: History, o: Outage) -> float | None:
    return next((s.end_s for s in history.steps.get(o.learner, []) if s.end_s > o.began_s), None)


def _births(history: History) -> list[Line]:
    births = [n for n in history.of_kind("joined") if n.data.get("role") == "birth"]
    if not births:
        return []
    names = ", ".join(n.learner for n in births) if len(births) <= MAX_NAMES else f"{len(births)} learners"
    seeded = [Line(n.t, f"{n.learner} gave the run its first parameters") for n in history.of_kind("born")]
    return [*seeded, Line(births[-1].t, f"{names} joined with the same first parameters")]


def _late_joins(history: History) -> list[Line]:
    """Learners that came when others trained already, one by one, or one line for all where there are many."""
    told = {(o.learner, o.joined_s) for o in outages(history)}
    joins = [n for n in history.of_kind("joined") if n.data.get("role") in ("late", "cold")]
    joins = [n for n in joins if (n.learner, n.t) not in told]
    if len(joins) > MAX_NAMES:
        return [Line(joins[-1].t, f"{len(joins)} learners more joined by now, later than the first")]
    donors = {
        (n.learner, n.data.get("incarnation")): n.data.get("donor") for n in history.of_kind("rejoin_proved")
    }
    return [Line(n.t, _late_join(n, donors.get((n.learner, n.data.get("incarnation"))))) for n in joins]


def _late_join(joined: Note, donor: str | None) -> str:
    if donor is None:
        return f"{joined.learner} joined later, without a donor: inner optimizer starts cold"
    return f"{joined.learner} joined later, with the state of {donor}"


def _departures(history: History) -> list[Line]:
    last = history.last_step_s
    return [
        Line(n.t, f"{n.learner}: left ({n.data.get('reason') or 'no reason given'})")
        for n in history.of_kind("left")
        if n.t < last
    ]


def _alarms(history: History) -> list[Line]:
    return [Line(n.t, _alarm(n), "bad") for n in history.of_kind("alarm")]


def _alarm(note: Note) -> str:
    return f"alarm: {note.data.get('what', '?')}: {note.data.get('detail', '')}".rstrip(": ")


def _epochs(history: History) -> list[Line]:
    """Gossip: who may meet whom from here on, where that changed."""
    return [
        Line(b.t, f"epoch {b.data['number']}: {len(b.data['members'])} learners may meet ({_change(a, b)})")
        for a, b in pairwise(history.of_kind("epoch"))
    ]


def _change(before: Note, after: Note) -> str:
    old, new = set(before.data["members"]), set(after.data["members"])
    parts = [("in", new - old), ("out", old - new)]
    return "; ".join(f"{', '.join(sorted(names, key=natural))} {word}" for word, names in parts if names)


def _half_exchanges(history: History) -> list[Line]:
    """Gossip: each, or one line for all where there are many."""
    notes = history.of_kind("half_exchange")
    if len(notes) > MAX_HALF:
        return [Line(notes[-1].t, f"{len(notes)} half exchanges by now: the mean of all moved", "warn")]
    return [
        Line(
            n.t,
            f"half exchange: in round {n.data['round']} only one of {' and '.join(n.data['learners'])} mixed",
            "warn",
        )
        for n in notes
    ]


def _end(history: History) -> list[Line]:
    if history.ended_s is None:
        return [Line(history.last_s, "the tape ends here: the run was interrupted", "warn")]
    return [Line(history.ended_s, f"run {history.end_reason}")]
