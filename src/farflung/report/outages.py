"""Failures and their recoveries: first cause, detection, return, proof, first merged contribution."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from farflung.report.history import Data, History, Note, natural

NOTED = ("lease_lapsed", "lease_renewed", "lost", "joined", "left", "rejoin_proved", "rejoined")


@dataclass
class Outage:
    """One failure of one learner (or of the syncer). Times are None for what did not happen (yet)."""

    learner: str
    began_s: float
    cause: str  # the first evidence, and never overwritten by later symptoms
    planned: bool = False  # the cause is in the fault plan
    exited_s: float | None = None
    lapsed_s: float | None = None
    renewed_s: float | None = None
    lost_s: float | None = None
    lost_reason: str = ""
    restarted_s: float | None = None
    joined_s: float | None = None
    role: str = ""
    incarnation: int | None = None
    proved_s: float | None = None
    proof: Data = field(default_factory=dict)
    merged_s: float | None = None

    @property
    def confirmed(self) -> bool:
        """More than a broken link that mended itself."""
        return self.planned or self.noticed_s is not None or self.joined_s is not None

    @property
    def noticed_s(self) -> float | None:
        """When the syncer first counted this learner out: its lease lapsed or it was lost."""
        return min((t for t in (self.lapsed_s, self.lost_s) if t is not None), default=None)

    @property
    def back(self) -> bool:
        return self.joined_s is not None


def outages(history: History) -> list[Outage]:
    """All confirmed failures in order of their first sign."""
    found = [o for learner in _names(history) for o in _of(history, learner) if o.confirmed]
    return sorted(found, key=lambda o: (o.began_s, natural(o.learner)))


def _names(history: History) -> list[str]:
    targets = {str(m.get("target", "")) for m in history.faults}
    return sorted({*history.learners, *targets} - {""}, key=natural)


@dataclass(frozen=True)
class _Sign:
    t: float
    kind: str  # fault, exited, restarted, trouble, or the kind of a note
    text: str = ""
    data: Data = field(default_factory=dict)


def _of(history: History, learner: str) -> Iterator[Outage]:
    current: Outage | None = None
    for sign in _signs(history, learner):
        if sign.kind in ("fault", "exited", "trouble", "lease_lapsed", "lost"):
            if current is not None and current.back:
                yield current
                current = None
            if current is None:
                current = Outage(learner, sign.t, sign.text, planned=sign.kind == "fault")
        if current is not None:
            _add(current, sign)
            if _closes(current, sign):
                yield current
                current = None
    if current is not None:
        yield current


def _closes(outage: Outage, sign: _Sign) -> bool:
    """Its work is merged again; or its link is back and nothing was lost; or it is heard again."""
    if sign.kind == "joined":
        return outage.role == "reattach"
    return sign.kind == "rejoined" or (sign.kind == "lease_renewed" and outage.lost_s is None)


def _add(outage: Outage, sign: _Sign) -> None:
    if sign.kind == "exited" and outage.exited_s is None:
        outage.exited_s = sign.t
    elif sign.kind == "fault":
        outage.planned = True
    elif sign.kind == "lost" and outage.lost_s is None:
        outage.lost_s, outage.lost_reason = sign.t, str(sign.data.get("reason", ""))
    elif sign.kind == "lease_lapsed" and outage.lapsed_s is None:
        outage.lapsed_s = sign.t
    elif sign.kind == "lease_renewed":
        outage.renewed_s = sign.t
    elif sign.kind == "restarted":
        outage.restarted_s = sign.t
    elif sign.kind == "joined":
        outage.joined_s, outage.role = sign.t, str(sign.data.get("role", ""))
        outage.incarnation = sign.data.get("incarnation")
    elif sign.kind == "rejoin_proved":
        outage.proved_s, outage.proof = sign.t, sign.data
    elif sign.kind == "rejoined":
        outage.merged_s = sign.t


def _signs(history: History, learner: str) -> list[_Sign]:
    """Everything that bears on this learner's presence, in time order; nothing after it left or the end."""
    signs = [
        _Sign(float(m["t"]), "fault", f"{m.get('fault', 'fault')} (fault plan)", m)
        for m in history.faults
        if m.get("target") == learner
    ]
    for m in history.metrics:
        if m.get("kind") == "process" and m.get("learner") == learner:
            event = str(m.get("event", ""))
            if event in ("exited", "restarted"):
                signs.append(_Sign(float(m["t"]), event, _exit_text(m), m))
    signs += [_Sign(x.t, "trouble", x.text) for x in history.troubles if x.learner == learner]
    signs += [
        _Sign(n.t, n.kind, _note_text(n), n.data)
        for n in history.notes
        if n.learner == learner and n.kind in NOTED
    ]
    signs.sort(key=lambda s: s.t)
    stop = min([s.t for s in signs if s.kind == "left"] + [_end(history)])
    return [s for s in signs if s.t < stop]


def _end(history: History) -> float:
    return float("inf") if history.ended_s is None else history.ended_s


def _note_text(note: Note) -> str:
    return "silent: lease lapsed" if note.kind == "lease_lapsed" else f"lost: {note.data.get('reason', '?')}"


def _exit_text(m: Data) -> str:
    code = m.get("code", m.get("returncode"))
    return "process exited" if code is None else f"process exited with code {code}"
