"""A round of a gossip learner: a meeting with each of its partners, and a slot for each of their vectors."""

from dataclasses import dataclass, field

from farflung.core import mixing
from farflung.protocol import messages as msg

MAX_PARTNERS = 64  # of one round

EARLY = "early"  # refusals of an offer: not yet; try again
LATE = "late"  # the round has ended here
STRANGER = "stranger"  # no meeting of this name


_newest: tuple[list[msg.Peer], mixing.Members] = ([], mixing.Members(()))


def members_of(peers: list[msg.Peer]) -> mixing.Members:
    """Peers as the matchings want them. Learners that share a process often share the message, too."""
    global _newest
    if peers is not _newest[0]:
        names, mbps = tuple(p.name for p in peers), tuple(p.mbps for p in peers)
        _newest = (peers, mixing.Members(names=names, mbps=mbps))
    return _newest[1]


def slot(turn: int, place: int) -> int:
    """Downlink slot of a partner's vector. Slot 0 holds values to install; two turns may be on their way."""
    return 1 + 2 * place + turn % 2


@dataclass
class Partner:
    """The other side of one meeting."""

    peer: msg.Peer
    slot: int
    weight: float  # alpha M_ij
    arrived: bool = False
    sent: bool = False
    relayed: bool = False
    tries: int = 0
    missed: str = ""

    @property
    def met(self) -> bool:
        return self.arrived and self.sent

    @property
    def settled(self) -> bool:
        return self.met or bool(self.missed)


@dataclass
class Meeting:
    """One round of a learner."""

    epoch: int
    round: int
    ends_at: int  # own step
    partners: dict[str, Partner] = field(default_factory=dict)  # by name, sorted
    num_bytes: int = 0
    offered_s: float | None = None
    waits_since_s: float | None = None  # the trainer stands at the end of the round
    until_s: float | None = None
    mixing: bool = False  # the mix was posted

    @property
    def settled(self) -> bool:
        """Whether every meeting of the round has come about or has failed."""
        return all(partner.settled for partner in self.partners.values())
