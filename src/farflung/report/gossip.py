"""What the records of a gossip run say: rounds that ended, waits for partners, consensus averages.

The hub's segment counts for rounds: learners tell it of each that ended. Learners' own segments add what the hub
does not see: how long they stood at a round's end, until when they would have, and the vectors that went straight
to a partner. A learner whose tape is elsewhere (it joined from another machine) lacks all but the bytes, which it
also reports.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from farflung.core.traffic import framed_bytes
from farflung.tape import Record

OFFER = "offer."  # how the names of vectors for partners begin (farflung.protocol.objects)


@dataclass(frozen=True)
class Side:
    """A meeting as one side saw it. `missed`: why it was not mixed in; empty if it was."""

    partner: str
    missed: str
    distance: float  # ||y_i - y_j||


@dataclass(frozen=True)
class EndedRound:
    """A learner ended a round. `tokens`: what it trained since the last one; `wait_s`: as its trainer said."""

    t: float
    learner: str
    epoch: int
    round: int
    sides: tuple[Side, ...]
    tokens: int
    wait_s: float

    @property
    def met(self) -> tuple[str, ...]:
        """The partners that were mixed in."""
        return tuple(side.partner for side in self.sides if not side.missed)


@dataclass(frozen=True)
class Average:
    """A consensus average; `distance` is the mean squared distance of the learners from it."""

    t: float
    version: int
    round: int
    learners: tuple[str, ...]
    distance: float


@dataclass(frozen=True)
class Stand:
    """A learner stood at the end of a round, to wait for partners. `ended`: the round ended, not the learner."""

    learner: str
    start_s: float
    end_s: float
    patience_s: float  # how long it would have stood
    ended: bool


@dataclass(frozen=True)
class Moved:
    """Bytes that a learner sent to (`up`) or got from (`down`) partners, frame headers and retries included."""

    t: float
    learner: str
    up: int
    down: int


@dataclass
class Gossip:
    rounds: list[EndedRound] = field(default_factory=list)
    averages: list[Average] = field(default_factory=list)
    stands: list[Stand] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    vector_bytes: int | None = None  # what one offer takes

    def pairs(self) -> list[tuple[float, float]]:
        """(time, half the squared distance) of the vectors of two that met, as each of both told it."""
        return [(r.t, side.distance**2 / 2) for r in self.rounds for side in r.sides if not side.missed]

    def distances(self) -> list[float]:
        """Of the averages and of `pairs`."""
        return [a.distance for a in self.averages] + [d for _, d in self.pairs()]


class GossipFold:
    """Takes records one by one; `finish` gives what they amount to."""

    def __init__(self) -> None:
        self._gossip = Gossip()
        self._trained: dict[
            tuple[str, int], int
        ] = {}  # (learner, incarnation) -> tokens since its last round
        self._offers: dict[str, int] = {}  # object -> bytes, on their way
        self._relayed: set[str] = set()  # objects that went to the hub
        self._standing: dict[str, Stand] = {}  # node -> open
        self._last_s: dict[str, float] = {}  # node -> its last record
        self._reported: list[Moved] = []  # as the hub was told

    def boundary(self, t: float, learner: str, incarnation: int, message: dict[str, Any]) -> None:
        """A boundary report, each once."""
        key = (learner, incarnation)
        self._trained[key] = self._trained.get(key, 0) + message.get("tokens", 0)
        mixed = message.get("mixed")
        if mixed is not None:
            sides = tuple(
                Side(m["partner"], m.get("missed", ""), float(m.get("distance") or 0.0))
                for m in mixed["meetings"]
            )
            wait_s = float(message.get("wait_s") or 0.0)
            self._gossip.rounds.append(
                EndedRound(t, learner, mixed["epoch"], mixed["round"], sides, self._trained.pop(key), wait_s)
            )

            up, down = mixed.get("bytes_up", 0), mixed.get("bytes_down", 0)
            if up or down:
                self._reported.append(Moved(t, learner, up, down))

    def handed_in(self, t: float, learner: str, message: dict[str, Any]) -> None:
        """The last message of a learner, with what moved after its last round."""
        up, down = message.get("bytes_up", 0), message.get("bytes_down", 0)
        if up or down:
            self._reported.append(Moved(t, learner, up, down))

    def averaged(self, t: float, data: dict[str, Any]) -> None:
        """A note of kind "consensus"."""
        if data.get("distance") is not None:
            average = Average(t, data["version"], data["round"], tuple(data["learners"]), data["distance"])
            self._gossip.averages.append(average)

    def learner_side(self, record: Record) -> None:
        """A record of a learner's own segment."""
        self._last_s[record.node] = record.t
        data = record.data
        if record.type == "SetTimer" and data["name"] == "meet":
            self._timer(record.t, record.node, data["at_s"])
        elif not str(data.get("object", "")).startswith(OFFER):
            return
        elif record.type in ("Offer", "Upload"):
            size = self._offers[data["object"]] = data["num_bytes"]
            self._gossip.vector_bytes = min(self._gossip.vector_bytes or size, size)  # dense rounds send more
            if record.type == "Upload":
                self._relayed.add(data["object"])
        elif record.type == "Uploaded":
            size = self._offers.pop(data["object"], 0)
            through_hub = data["object"] in self._relayed
            self._move(record, up=framed_bytes(size) if through_hub else data.get("sent_bytes", 0))
        elif record.type == "UploadFailed":
            self._move(record, up=data.get("sent_bytes") or 0)
        elif record.type == "Arrived":
            self._move(record, down=data["num_bytes"])

    def _timer(self, t: float, node: str, at_s: float | None) -> None:
        if at_s is not None:
            self._standing[node] = Stand(learner_of(node), t, t, at_s - t, ended=False)
        elif node in self._standing:
            self._gossip.stands.append(replace(self._standing.pop(node), end_s=t, ended=True))

    def _move(self, record: Record, up: int = 0, down: int = 0) -> None:
        if up or down:
            self._gossip.moved.append(Moved(record.t, learner_of(record.node), up, down))

    def finish(self) -> Gossip:
        for node, stand in sorted(self._standing.items()):
            self._gossip.stands.append(replace(stand, end_s=self._last_s[node]))
        self._standing.clear()
        taped = {learner_of(node) for node in self._last_s}
        self._gossip.moved += [moved for moved in self._reported if moved.learner not in taped]
        return self._gossip


def learner_of(node: str) -> str:
    """The learner whose segment this is.

    >>> learner_of("learner-2.3")
    'learner-2'
    """
    return node.split(".")[0]


def waits(gossip: Gossip) -> Iterator[tuple[str, tuple[float, float]]]:
    """(learner, interval) of every wait for partners, as the learners' tapes tell it."""
    return ((s.learner, (s.start_s, s.end_s)) for s in gossip.stands if s.end_s > s.start_s)
