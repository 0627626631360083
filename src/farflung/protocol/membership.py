"""Who takes part: incarnations, leases, what each member holds and how fast it goes."""

from dataclasses import dataclass, field
from typing import Literal

from farflung.core.quorum import Ema
from farflung.protocol.messages import Boundary
from farflung.protocol.own_state import Life, OwnState

State = Literal["waiting", "seeding", "joining", "training", "handed_in", "saved", "gone"]
PRESENT = ("waiting", "seeding", "joining", "training", "handed_in", "saved")


@dataclass
class Member:
    """One learner by name, over all its incarnations. Lists have one entry a fragment."""

    name: str
    index: int
    incarnation: int = 0
    connection: int | None = None
    state: State = "gone"
    lease_until_s: float = 0.0
    lapsed: bool = False  # as last noted
    sequence: int = 0  # of the last boundary report of this incarnation
    step: int = 0
    cursor: int = 0
    steps_done: int = 0  # over all incarnations
    tokens: int = 0  # over all incarnations
    trained_s: float = 0.0
    loss: float | None = None
    last_boundary_s: float | None = None
    step_s: Ema = field(default_factory=Ema)
    held: list[int] = field(default_factory=list)
    announced: list[int] = field(default_factory=list)  # newest version this incarnation was told of
    included: list[int | None] = field(default_factory=list)  # round of its last merged contribution
    merged: int = 0  # contributions merged, this incarnation
    non_finite: list[int] = field(default_factory=list)  # refusals in a row: one broken fragment is enough
    rejoining: bool = False  # until its first merged contribution
    address: str | None = None  # gossip: where partners dial it
    mbps: float | None = None  # gossip: of its link, declared or seen
    offer: str | None = None  # transfer of donor state on its way to this member
    expected: "Expected | None" = None
    own: OwnState | None = None  # what its newest process found
    life: Life | None = None  # the newest incarnation that was proven
    saved: str = ""  # digest of what it saved at an orderly stop

    def count(self, boundary: Boundary, now: float) -> None:
        """Take in one boundary report."""
        self.sequence, self.step, self.cursor = boundary.sequence, boundary.step, boundary.cursor
        self.last_boundary_s = now
        if self.life is not None:
            self.life.step = boundary.step
        self.trained_s += boundary.step_s
        if boundary.tokens > 0:
            self.steps_done += 1
            self.tokens += boundary.tokens
            self.loss = boundary.loss
            self.step_s = self.step_s.update(boundary.step_s)

    def live(self, now: float) -> bool:
        return self.state in PRESENT and now <= self.lease_until_s

    def heard(self, now: float, lease_s: float, within_s: float) -> bool:
        """Whether anything of it arrived in the last `within_s` seconds."""
        return self.live(now) and now - (self.lease_until_s - lease_s) <= within_s

    def progressing(self, now: float, patience_s: float) -> bool:
        """Training, and a boundary was heard of within `patience_s` or three of its own steps."""
        if self.state != "training" or self.last_boundary_s is None or now > self.lease_until_s:
            return False
        silent_s = now - self.last_boundary_s
        return silent_s <= patience_s or silent_s <= 3 * (self.step_s.value or 0.0)


@dataclass
class Expected:
    """What a joiner must prove to hold, from the moment `Install` was sent."""

    versions: list[int]
    digests: list[str]
    cursor: int
    donor: str | None = None
    inner_digest: str | None = None
    lr: float | None = None
    reason: str = "birth"
    own_digests: list[str] | None = None  # None: its own state begins at zero, or there is none
    own_refusal: str = ""  # why it does


class Membership:
    """All members ever seen, by name."""

    def __init__(self, num_fragments: int) -> None:
        self.num_fragments = num_fragments
        self.members: dict[str, Member] = {}  # a name stays for good
        self.connections: dict[int, str] = {}
        self._in_order: list[Member] = []

    def of(self, connection: int) -> Member | None:
        name = self.connections.get(connection)
        return self.members[name] if name is not None else None

    def enter(self, name: str, connection: int) -> Member:
        """A new incarnation of a learner; its counters start afresh, its data position and totals stay."""
        member = self.members.setdefault(name, Member(name, len(self.members)))
        member.incarnation += 1
        member.sequence = member.merged = 0
        member.non_finite = [0] * self.num_fragments
        member.step_s, member.last_boundary_s, member.loss = Ema(), None, None
        member.held = [0] * self.num_fragments
        member.announced = [-1] * self.num_fragments
        member.included = [None] * self.num_fragments
        member.rejoining, member.offer, member.expected = False, None, None
        self.bind(member, connection)
        return member

    def bind(self, member: Member, connection: int) -> None:
        self.unbind(member.connection)
        member.connection = connection
        self.connections[connection] = member.name

    def unbind(self, connection: int | None) -> None:
        if connection is None:
            return
        name = self.connections.pop(connection, None)
        if name is not None and self.members[name].connection == connection:
            self.members[name].connection = None

    def sorted(self) -> list[Member]:
        """All members by name. Read only."""
        if len(self._in_order) != len(self.members):
            self._in_order = [self.members[name] for name in sorted(self.members)]
        return self._in_order

    def present(self) -> list[Member]:
        return [m for m in self.sorted() if m.state in PRESENT]

    def training(self) -> list[Member]:
        return [m for m in self.sorted() if m.state == "training"]
