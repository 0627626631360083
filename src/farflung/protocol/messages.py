"""What learner and syncer say to each other on the control channel: bytes, never megabytes.

Control is FIFO until a disconnection, which loses an unknown tail. Bulk data travels separately
(`farflung.protocol.objects` names it); a `Contribute` is sent only after its object was acknowledged.
"""

from typing import Literal

import msgspec

from farflung.protocol.own_state import OwnState

PROTOCOL = 1  # raised with every incompatible change of this file

Fate = Literal["merged", "late", "stale_base", "rejected", "cancelled", "learner_lost"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    pass


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Gossip: a member of an epoch."""

    name: str
    address: str | None  # where it may be dialled; None: through the hub
    mbps: float | None = None  # of its link, as far as known


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Gossip: one partner of one round, as one side saw it."""

    partner: str
    missed: str = ""  # why it was not mixed in; empty: it was
    distance: float = 0.0  # ||y_i - y_j||


class RoundMixed(msgspec.Struct, frozen=True, kw_only=True):
    """Gossip: a learner's round ended, with this."""

    epoch: int
    round: int
    meetings: list[Meeting]
    correction: float  # ||c_i||
    mbps: float | None = None  # what its link was seen to carry
    bytes_up: int = 0  # straight to partners since the last report, frame headers and retries included
    bytes_down: int = 0  # and straight from them


# ---- learner to syncer ---------------------------------------------------------------------------------


class Join(Message, frozen=True):
    """First message of every connection. `incarnation` is set by a learner that reattaches."""

    protocol: int
    run: str | None  # None: whichever run this syncer serves
    learner: str
    fingerprint: str  # names, shapes, dtypes, fragment plan
    layout: str  # the fragment plan as JSON; the first member's becomes the run's
    method: str  # method name and digest of its policy
    incarnation: int | None = None
    held: list[int] = []  # versions held, one a fragment, when reattaching
    sequence: int = 0  # of the last boundary report
    address: str | None = None  # gossip: where partners may dial it
    mbps: float | None = None  # gossip: of its link, where declared
    own: OwnState | None = None  # of a new process: what it found; None: the method has no state of its own
    saved: str = ""  # after a resume: digest of all that was given back


class Boundary(Message, frozen=True):
    """Metadata of one boundary: what was trained, adopted and snapshotted there."""

    sequence: int  # 1, 2, ... within an incarnation; repeats are ignored
    step: int
    tokens: int = 0  # of the step that ended here; 0 when a wait ended here
    step_s: float = 0.0
    wait_s: float = 0.0
    loss: float | None = None
    lr: float | None = None
    progress_tokens: int = 0  # of the run, as the step's schedule saw them
    cursor: int = 0
    adopted: list[tuple[int, int]] = []  # (fragment, version)
    snapshots: list[tuple[int, int]] = []  # (fragment, round)
    mixed: RoundMixed | None = None


class Contribute(Message, frozen=True):
    """A contribution whose bytes the syncer has acknowledged."""

    fragment: int
    round: int
    base_version: int
    steps: int  # c_steps
    tokens: int  # c_tokens
    num_bytes: int
    sync_s: float = 0.0  # from snapshot to acknowledgement


class Seeded(Message, frozen=True):
    """All fragments of version 0 were uploaded."""


class Heartbeat(Message, frozen=True):
    pass


class StateReady(Message, frozen=True):
    """A donor's inner-optimizer state lies at the syncer."""

    transfer: str
    num_bytes: int
    digest: str
    lr: float
    step: int
    held: list[int]


class StateFailed(Message, frozen=True):
    transfer: str
    reason: str


class Installed(Message, frozen=True):
    """A joiner holds these bits, and starts."""

    versions: list[int]
    digests: list[str]
    inner_digest: str | None
    lr: float | None
    cursor: int
    step: int
    own_digests: list[str] = []  # of the method's own state, one a fragment


class HandedIn(Message, frozen=True):
    """Every final contribution of this learner was sent."""

    bytes_up: int = 0  # gossip: straight to partners, since the last round that ended
    bytes_down: int = 0  # and straight from them


class Saved(Message, frozen=True):
    """The learner wrote all its state and stopped, ready to be resumed."""

    step: int
    digest: str = ""  # of what it wrote


class TrainerLost(Message, frozen=True):
    reason: str


class Leave(Message, frozen=True):
    reason: str


# ---- syncer to learner ---------------------------------------------------------------------------------


class Refused(Message, frozen=True):
    reason: str  # a name: token, run, fingerprint, method, protocol, fenced, closing
    detail: str  # one line for a person


class Welcome(Message, frozen=True):
    run: str
    incarnation: int
    index: int  # this learner's place among all learners ever seen
    tokens: int  # of the whole run
    budget_tokens: int


class SeedRequest(Message, frozen=True):
    """You are the first: upload your parameters as version 0."""


class StateOffer(Message, frozen=True, tag=False):
    transfer: str
    donor: str
    num_bytes: int
    digest: str


class Install(Message, frozen=True):
    """Load these versions, the donor's inner state and your own data position; then start."""

    versions: list[int]
    cursor: int
    step: int  # lockstep: where the others stand; free: where this learner last stood
    syncer_step: int
    state: StateOffer | None
    reason: str  # birth, rejoin, cold: why there is or is no state
    own: list[bool] | None = None  # take over your own state: a fragment, with your last contribution?


class Reattached(Message, frozen=True):
    """Go on as you are; repeat `Installed` if it did not arrive, and the boundaries after `sequence`."""

    installed: bool
    sequence: int
    syncer_step: int


class Epoch(Message, frozen=True):
    """Gossip: who may meet whom, from each learner's next round on; that round is at least `round`."""

    number: int
    round: int
    seed: int  # of the matchings
    members: list[Peer]  # sorted by name


class Relay(Message, frozen=True):
    """Gossip: an object for `partner` lies at the hub (up); fetch it there (down, `partner` is its sender)."""

    partner: str
    object: str
    num_bytes: int


class Relayed(Message, frozen=True):
    """Gossip: the object was fetched (`refusal` empty), or is not wanted; to the hub, and on to its sender."""

    partner: str
    object: str
    refusal: str = ""


class Invite(Message, frozen=True):
    """Pull: send your work on this fragment."""

    fragment: int
    round: int


class Announce(Message, frozen=True):
    """A new version exists. `included` is the round of your last contribution that is part of it."""

    fragment: int
    version: int
    included: int | None
    syncer_step: int


class FateOf(Message, frozen=True):
    fragment: int
    round: int
    fate: Fate
    reason: str = ""


class Progress(Message, frozen=True):
    tokens: int
    sequence: int  # last boundary report that arrived


class Donate(Message, frozen=True):
    """Upload your inner-optimizer state for a joiner."""

    transfer: str


class Finish(Message, frozen=True):
    """The budget is spent: adopt these versions, then hand in every fragment under these rounds."""

    versions: list[int]
    rounds: list[int]


class Suspend(Message, frozen=True):
    """Write your state and stop; the run will be resumed."""


class Stop(Message, frozen=True):
    reason: str  # finished, suspended, fenced, reset


LearnerMessage = (
    Join | Boundary | Contribute | Seeded | Heartbeat | StateReady | StateFailed
    | Installed | HandedIn | Saved | TrainerLost | Leave | Relay | Relayed
)  # fmt: skip
SyncerMessage = (
    Refused | Welcome | SeedRequest | Install | Reattached | Invite | Announce | FateOf
    | Progress | Donate | Finish | Suspend | Stop | Epoch | Relay | Relayed
)  # fmt: skip
