"""Commands to a trainer and its reports: the only link between the tensors and the Learner machine.

The trainer executes commands at its boundaries and never waits for an answer. A command posted before
boundary s takes effect at s or later; `at_step` names an exact boundary (lockstep pace).
"""

import msgspec

from farflung.protocol.own_state import OwnState


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    pass


class Begin(Command, frozen=True):
    """The syncer took this learner in, as one of a run."""

    run: str
    incarnation: int
    index: int  # among all learners ever seen: which shard of the data is its own


class Seed(Command, frozen=True):
    """Write every fragment's fp32 value into the downlink slots."""


class Load(Command, frozen=True):
    """Install one version of every fragment (from the downlink slots), then inner state and cursor."""

    versions: list[int]
    cursor: int
    step: int
    state: bool  # inner state lies in the state slot
    own: list[bool] | None = (
        None  # take over the own state that was found: a fragment, with its last contribution?
    )


class Adopt(Command, frozen=True):
    fragment: int
    version: int
    included: int | None  # round of the learner's last contribution inside this version
    at_step: int = 0
    base_version: int | None = None  # the slot holds increments from this version on, not the whole value


class Snapshot(Command, frozen=True):
    fragment: int
    round: int
    at_step: int = 0
    final: bool = False  # hand-in: taken even if an adoption left nothing to send


class Mix(Command, frozen=True):
    """Gossip: end this round at boundary `at_step`, mixed with what lies in these downlink slots."""

    round: int
    parts: list[tuple[int, float]]  # (slot, alpha M_ij), in sorted order of the partners
    at_step: int = 0


class Show(Command, frozen=True):
    """Gossip: write the parameters, not the offered vector, for a consensus average."""

    round: int  # the hub's
    final: bool = False  # live, with the work of the round under way; else as the round began


class Settle(Command, frozen=True):
    """The fate of a contribution is known: commit or roll back what sending changed."""

    fragment: int
    round: int
    merged: bool


class RunUntil(Command, frozen=True):
    """Do not begin another step at or beyond this one."""

    step: int | None
    reason: str = ""


class Donate(Command, frozen=True):
    transfer: str


class Advance(Command, frozen=True):
    """Tokens that the whole run has trained."""

    tokens: int
    budget_tokens: int


class Save(Command, frozen=True):
    """Write everything that `--resume` needs, then stop."""


class End(Command, frozen=True):
    reason: str


AnyCommand = (
    Begin | Seed | Load | Adopt | Snapshot | Mix | Show | Settle | RunUntil | Donate | Advance | Save | End
)  # fmt: skip


class Report(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    pass


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """One snapshot, encoded into the fragment's uplink slot."""

    fragment: int
    round: int
    base_version: int
    steps: int
    tokens: int
    num_bytes: int
    finite: bool = True  # gossip; a hub looks for itself


class Mixed(msgspec.Struct, frozen=True, kw_only=True):
    """Gossip: a round ended here. `distances` are ``||y_i - y_j||``, one a part; None: it was not finite."""

    round: int
    steps: int
    tokens: int
    distances: list[float | None]
    correction: float  # ||c_i||


class SeedTaken(Report, frozen=True):
    num_bytes: list[int]  # one a fragment


class BoundaryPassed(Report, frozen=True):
    step: int
    tokens: int = 0
    step_s: float = 0.0
    wait_s: float = 0.0
    loss: float | None = None
    lr: float | None = None
    progress_tokens: int = 0  # of the run, as the step's schedule saw them
    cursor: int = 0
    adopted: list[tuple[int, int]] = []
    taken: list[Taken] = []
    skipped: list[int] = []  # fragments whose final snapshot had nothing to send
    mixed: Mixed | None = None


class Ready(Report, frozen=True):
    """The trainer has a model. `incarnation` is set when it goes on where a save file or a dead sidecar was."""

    learner: str
    fingerprint: str
    layout: str
    method: str
    run: str | None = None
    incarnation: int | None = None
    held: list[int] = []
    step: int = 0
    sequence: int = 0
    worked: int = 0  # steps since the newest parameters or the last mix
    outstanding: list[Taken] = []  # contributions without a fate, still in their slots
    recent: list[BoundaryPassed] = []  # the last reports, up to `sequence`: a dead sidecar may have kept some
    own: OwnState | None = None  # what a new process found; None: the method has no state of a learner's own
    saved: str = ""  # digest of all that a save file gave back


class Loaded(Report, frozen=True):
    versions: list[int]
    digests: list[str]
    inner_digest: str | None
    lr: float | None
    cursor: int
    step: int
    own_digests: list[str] = []  # of the method's own state, one a fragment


class Donated(Report, frozen=True):
    """Inner state lies in the state slot."""

    transfer: str
    num_bytes: int
    digest: str
    lr: float
    step: int


class Shown(Report, frozen=True):
    """Parameters lie in uplink slot 1."""

    round: int
    final: bool
    steps: int
    tokens: int
    num_bytes: int


class SaveDone(Report, frozen=True):
    step: int
    digest: str = ""  # of all that was saved


class KeepFailed(Report, frozen=True):
    """The own state could not be written: a crash from now on begins it at zero."""

    reason: str


class Ended(Report, frozen=True):
    """The user's loop ended by itself."""

    reason: str


AnyReport = Ready | SeedTaken | BoundaryPassed | Loaded | Donated | Shown | SaveDone | KeepFailed | Ended
