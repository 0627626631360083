"""What the records of a run say, as facts without judgement: steps, waits, merges, transfers, notes.

Only the syncer's segment counts for steps and merges (it is the one place where all learners meet);
learners' segments add what only they could see of a failure. All times are seconds since the run's start.
"""

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from farflung.core.traffic import framed_bytes
from farflung.report.gossip import Gossip, GossipFold, learner_of
from farflung.report.gossip import waits as partner_waits
from farflung.tape import Record
from farflung.units import packed_starts

Data = dict[str, Any]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Step:
    """One inner step of a learner. `run_tokens`: tokens of all learners when its report arrived."""

    start_s: float
    end_s: float
    tokens: int
    loss: float | None
    run_tokens: int


@dataclass(frozen=True)
class Merged:
    """One committed merge. `final` merges are the plain average at the end.

    Gossip: a learner's round that ended, `learners` being those whose vectors it mixed, itself first, and `live`
    how many it would have been had it missed nobody.
    """

    t: float
    fragment: int
    version: int
    learners: tuple[str, ...]
    breadth: int
    live: int
    tokens: int
    quorum_s: float
    grace_s: float
    final: bool


@dataclass(frozen=True)
class Note:
    t: float
    kind: str
    data: Data

    @property
    def learner(self) -> str:
        return str(self.data.get("learner", ""))


@dataclass(frozen=True)
class Transfer:
    """Bytes that a learner sent (`up`) or received (`down`) by time t, frame headers included, as the tape has it.

    kind: contribution, version, increment, install (versions for a joiner), seed, state, gradient; offer: to or
    from a partner.
    """

    t: float
    learner: str
    up: int
    down: int
    kind: str = ""
    fragment: int = 0

    @property
    def partner(self) -> bool:
        return self.kind == "offer"


@dataclass(frozen=True)
class Trouble:
    """Evidence of a failure: who, and what was seen first-hand."""

    t: float
    learner: str
    text: str


@dataclass
class History:
    policy: Data = field(default_factory=dict)
    run: str = ""
    num_learners: int = 0
    budget_tokens: int = 0
    steps: dict[str, list[Step]] = field(default_factory=dict)
    waits: dict[str, list[Interval]] = field(default_factory=dict)
    merges: list[Merged] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    welcomes: list[tuple[float, str]] = field(default_factory=list)  # (t, learner): admitted
    troubles: list[Trouble] = field(default_factory=list)
    metrics: list[Data] = field(default_factory=list)
    gossip: Gossip | None = None  # None: learners met at a hub
    sizes: "list[FragmentBytes]" = field(default_factory=list)  # empty: the tape does not say
    payload_bytes: dict[int, int] = field(default_factory=dict)  # by fragment: what a codec made of it
    last_s: float = 0.0
    ended_s: float | None = None
    end_reason: str | None = None

    @property
    def learners(self) -> list[str]:
        """Every learner ever seen, in name order."""
        return sorted(set(self.steps) | {n.learner for n in self.notes if n.kind == "joined"}, key=natural)

    @property
    def start_s(self) -> float:
        """Start of the first step of any learner; 0 if none was trained."""
        return min((steps[0].start_s for steps in self.steps.values() if steps), default=0.0)

    @property
    def end_s(self) -> float:
        """When the syncer finished; for an interrupted run the last record."""
        return max(self.start_s, self.last_s if self.ended_s is None else self.ended_s)

    @property
    def last_step_s(self) -> float:
        """End of the last step of any learner; 0 if none was trained."""
        return max((steps[-1].end_s for steps in self.steps.values() if steps), default=0.0)

    @property
    def tokens(self) -> int:
        """Tokens reported at boundaries, repeats left out."""
        return sum(s.tokens for steps in self.steps.values() for s in steps)

    @property
    def evals(self) -> list[Data]:
        return [m for m in self.metrics if m.get("kind") == "eval" and m.get("loss") is not None]

    @property
    def faults(self) -> list[Data]:
        return [m for m in self.metrics if m.get("kind") == "fault"]

    def of_kind(self, kind: str) -> list[Note]:
        return [n for n in self.notes if n.kind == kind]


def natural(name: str) -> tuple[str, int]:
    """Sort key that puts learner-2 before learner-10.

    >>> sorted(["learner-10", "learner-2"], key=natural)
    ['learner-2', 'learner-10']
    """
    head = name.rstrip("0123456789")
    return head, int(name[len(head) :] or -1)


def read_history(records: Iterable[Record], metrics: Iterable[Data] = ()) -> History:
    """Fold a run's records, ordered by time, into its history."""
    fold = _Fold()
    for record in records:
        fold.feed(record)
    return fold.finish(list(metrics))


@dataclass(frozen=True)
class _Report:
    """A boundary report as it arrived."""

    t: float
    incarnation: int
    message: Data
    run_tokens: int


class _Fold:
    def __init__(self) -> None:
        self.history = History()
        self.tokens = 0
        self.speaker: dict[int, str] = {}  # connection -> learner
        self.incarnation: dict[int, int] = {}  # connection -> incarnation
        self.seen: set[tuple[str, int, int]] = set()  # (learner, incarnation, sequence)
        self.reports: dict[str, list[_Report]] = {}
        self.final: set[tuple[int, int]] = set()  # (fragment, version) of final merges
        self.gossip = GossipFold()
        self.held: dict[str, list[int]] = {}  # learner -> version of each fragment
        self.contributed: set[tuple[str, int, int, int]] = set()  # (learner, incarnation, fragment, round)
        self.on: dict[str, Callable[[Record], None]] = {
            "MessageArrived": self._message,
            "Disconnected": self._disconnected,
            "HangUp": self._hung_up,
            "Send": self._sent,
            "Merge": self._merge,
            "Note": self._note,
            "Finished": self._finished,
        }

    def feed(self, record: Record) -> None:
        self.history.last_s = max(self.history.last_s, record.t)
        syncer = record.node.split(".")[0] == "syncer"
        if record.kind == "header":
            if syncer:
                self._header(record.data)
        elif not syncer:
            self._learner_side(record)
        elif record.type in self.on:
            self.on[record.type](record)

    def finish(self, metrics: list[Data]) -> History:
        history = self.history
        history.metrics = sorted(metrics, key=lambda m: float(m.get("t", 0.0)))
        for learner, reports in sorted(self.reports.items()):
            history.steps[learner], history.waits[learner] = _place(reports)
        history.troubles.sort(key=lambda x: x.t)
        if history.policy.get("topology") == "gossip":
            self._add_gossip(self.gossip.finish())
        history.num_learners = history.num_learners or len(history.learners)
        return history

    def _add_gossip(self, gossip: Gossip) -> None:
        """Learners' ends of rounds take the place of merges: the hub's are consensus averages."""
        history = self.history
        history.gossip = gossip
        history.merges = [
            Merged(
                t=end.t, fragment=0, version=end.round, learners=(end.learner, *end.met), breadth=1 + len(end.met),
                live=1 + len(end.sides), tokens=end.tokens, quorum_s=0.0, grace_s=0.0, final=False,
            )
            for end in gossip.rounds
        ]  # fmt: skip
        history.transfers += [Transfer(x.t, x.learner, x.up, x.down, "offer") for x in gossip.moved]
        history.payload_bytes = {} if gossip.vector_bytes is None else {0: gossip.vector_bytes}
        history.transfers.sort(key=lambda x: x.t)
        for learner, interval in partner_waits(gossip):
            history.waits.setdefault(learner, []).append(interval)

    def _header(self, data: Data) -> None:
        self.history.policy = data.get("policy") or {}
        self.history.run = str(data.get("run", ""))
        self.history.num_learners = int(data.get("num_learners") or 0)
        self.history.budget_tokens = int(data.get("budget_tokens") or 0)

    def _message(self, record: Record) -> None:
        connection, message = record.data["connection"], record.data["message"]
        if message["type"] == "Join":
            self.speaker[connection] = message["learner"]
            self.incarnation[connection] = message.get("incarnation") or 0
            sizes = self.history.sizes or fragment_bytes(message.get("layout", ""), self.history.policy)
            self.history.sizes = sizes
            return
        learner = self.speaker.get(connection)
        if learner is None:
            return
        kind = message["type"]
        if kind == "Boundary":
            self._boundary(record.t, connection, learner, message)
        elif kind == "Contribute":
            self._contribute(record.t, connection, learner, message)
        elif kind == "Seeded":
            for p, size in enumerate(self.history.sizes):
                self._transfer(record.t, learner, "seed", p, up=size.value)
        elif kind == "StateReady":
            self._transfer(record.t, learner, "state", up=message["num_bytes"])
        elif kind == "Installed":
            self.held[learner] = list(message["versions"])
            for p, size in enumerate(self.history.sizes):
                self._transfer(record.t, learner, "install", p, down=size.value)
        elif kind == "HandedIn":
            self.gossip.handed_in(record.t, learner, message)
        elif kind == "TrainerLost":
            self.history.troubles.append(Trouble(record.t, learner, f"trainer lost: {message['reason']}"))

    def _boundary(self, t: float, connection: int, learner: str, message: Data) -> None:
        incarnation = self.incarnation[connection]
        key = (learner, incarnation, message["sequence"])
        if key in self.seen:
            return
        self.seen.add(key)
        self.tokens += message.get("tokens", 0)
        self.reports.setdefault(learner, []).append(_Report(t, incarnation, message, self.tokens))
        self.gossip.boundary(t, learner, incarnation, message)
        for fragment, version in message.get("adopted", []):
            self._adopt(t, learner, fragment, version)

    def _contribute(self, t: float, connection: int, learner: str, message: Data) -> None:
        """Each once: a learner whose link broke says it again."""
        key = (learner, self.incarnation[connection], message["fragment"], message["round"])
        if key not in self.contributed:
            self.contributed.add(key)
            self._transfer(t, learner, "contribution", message["fragment"], up=message["num_bytes"])
            self.history.payload_bytes[message["fragment"]] = message["num_bytes"]

    def _adopt(self, t: float, learner: str, fragment: int, version: int) -> None:
        """The download of a version; with a downlink codec of its increments, where these are smaller."""
        if fragment >= len(self.history.sizes):
            return
        size, held = self.history.sizes[fragment], self.held.get(learner, [])
        steps = version - held[fragment] if fragment < len(held) else 0
        if steps:
            held[fragment] = version
        if size.increment is not None and 0 < steps * size.increment < size.value:
            self._transfer(t, learner, "increment", fragment, down=steps * size.increment)
        else:
            self._transfer(t, learner, "version", fragment, down=size.value)

    def _transfer(
        self, t: float, learner: str, kind: str, fragment: int = 0, *, up: int = 0, down: int = 0
    ) -> None:
        """An object of so many bytes passed; frame headers are added here."""
        up, down = (framed_bytes(n) if n else 0 for n in (up, down))
        self.history.transfers.append(Transfer(t, learner, up, down, kind, fragment))

    def _disconnected(self, record: Record) -> None:
        learner = self.speaker.pop(record.data["connection"], None)
        if learner is not None:
            reason = record.data.get("reason") or "link closed"
            self.history.troubles.append(Trouble(record.t, learner, f"disconnected: {reason}"))

    def _hung_up(self, record: Record) -> None:
        self.speaker.pop(record.data["connection"], None)

    def _sent(self, record: Record) -> None:
        connection, message = record.data["connection"], record.data["message"]
        if message["type"] == "Welcome":
            self.incarnation[connection] = message["incarnation"]
            if connection in self.speaker:
                self.history.welcomes.append((record.t, self.speaker[connection]))
        elif message["type"] == "Install" and message.get("state") and connection in self.speaker:
            self._transfer(record.t, self.speaker[connection], "state", down=message["state"]["num_bytes"])

    def _merge(self, record: Record) -> None:
        if record.data.get("final"):
            self.final.add((record.data["fragment"], record.data["version"]))

    def _note(self, record: Record) -> None:
        note = Note(record.t, record.data["kind"], record.data.get("data") or {})
        self.history.notes.append(note)
        if note.kind == "merged":
            self.history.merges.append(self._merged(note))
        elif note.kind == "all_reduced":
            for learner in note.data["learners"]:
                up, down = note.data["up"], note.data["down"]
                self.history.transfers.append(Transfer(note.t, learner, up, down, "gradient"))
        elif note.kind == "consensus":
            self.gossip.averaged(note.t, note.data)

    def _merged(self, note: Note) -> Merged:
        get = note.data.get
        learners = tuple(get("learners") or ())
        fragment, version = int(get("fragment", 0)), int(get("version", 0))
        return Merged(
            t=note.t,
            fragment=fragment,
            version=version,
            learners=learners,
            breadth=int(get("breadth", len(learners))),
            live=int(get("live") or 0),
            tokens=int(get("tokens") or 0),
            quorum_s=float(get("quorum_s") or 0.0),
            grace_s=float(get("grace_s") or 0.0),
            final=(fragment, version) in self.final,
        )

    def _finished(self, record: Record) -> None:
        self.history.ended_s, self.history.end_reason = record.t, str(record.data.get("reason", ""))

    def _learner_side(self, record: Record) -> None:
        self.gossip.learner_side(record)
        text = {"TrainerGone": "trainer gone", "LinkDown": "link down"}.get(record.type)
        if text is not None:
            learner = learner_of(record.node)
            reason = record.data.get("reason")
            self.history.troubles.append(Trouble(record.t, learner, f"{text}: {reason}" if reason else text))


def _place(reports: list[_Report]) -> tuple[list[Step], list[Interval]]:
    """Where on the clock a learner's steps lie: each ends when its report arrived, or earlier.

    Reports that were held up by a broken link arrive in one burst: steps of one incarnation never overlap,
    so a burst is laid out backwards from its last report. A step reports the whole wait before it; what was
    reported while it lasted lies inside.
    """
    steps: list[Step] = []
    waits: list[Interval] = []
    begin = latest = float("inf")  # of the step after this report; of the wait before it
    incarnation = -1
    for report in reversed(reports):
        if report.incarnation != incarnation:
            begin, latest, incarnation = float("inf"), float("inf"), report.incarnation
        message = report.message
        if message.get("tokens", 0) > 0:
            end = min(report.t, latest)
            start = begin = end - message.get("step_s", 0.0)
            steps.append(Step(start, end, message["tokens"], message.get("loss"), report.run_tokens))
        else:
            start = min(report.t, begin)
        waited = start - message.get("wait_s", 0.0)
        latest = min(latest, waited)
        if waited < start:
            waits.append((waited, start))
    return steps[::-1], waits[::-1]


@dataclass(frozen=True)
class FragmentBytes:
    """Of one fragment, without frame headers.

    dense: its parameters in fp32. value: what the hub serves, with buffers and counters
    (`farflung.engine.layout`). increment: what leads to the next version; None: whole values go down.
    """

    dense: int
    value: int
    increment: int | None = None


def fragment_bytes(layout: str, policy: Data | None = None) -> list[FragmentBytes]:
    """Sizes of each fragment, from the fragment plan's JSON.

    Returns an empty list for a layout that this version cannot read: byte figures are then left out.
    """
    try:
        fragments = json.loads(layout)["fragments"]
        lengths = [[sum(p["length"] for p in f[kind]) for kind in KINDS] for f in fragments]
    except (ValueError, KeyError, TypeError):
        return []
    sizes = [FragmentBytes(4 * n, packed_starts(4 * n, 4 * b, 8 * c)[-1]) for n, b, c in lengths]
    codec = (policy or {}).get("downlink_codec")
    return sizes if codec is None else _with_increments(sizes, layout, codec)


KINDS = ("pieces", "buffers", "counters")


def _with_increments(sizes: list[FragmentBytes], layout: str, codec: str) -> list[FragmentBytes]:
    """Only a downlink codec needs the codecs, and with them torch."""
    from farflung.core.codecs import get_codec
    from farflung.core.fragments import FragmentPlan
    from farflung.engine.layout import codec_of, payload_layout

    plan, named = FragmentPlan.from_json(layout), get_codec(codec)
    made = [payload_layout(f, codec_of(f, named, plan.tensors)).size_bytes for f in plan.fragments]
    return [replace(size, increment=increment) for size, increment in zip(sizes, made, strict=True)]


def median(values: Iterable[float]) -> float:
    """Median; 0 for nothing."""
    values = list(values)
    return statistics.median(values) if values else 0.0
