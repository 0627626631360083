"""What happens to a machine: past tense, scalars only, written to the tape before the actions it causes."""

from typing import Literal

import msgspec

from farflung.protocol.mailbox import AnyReport
from farflung.protocol.messages import LearnerMessage, SyncerMessage


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    pass


class TimerFired(Event, frozen=True):
    name: str
    late_s: float = 0.0  # how late the driver itself was: credited to every lease


# ---- syncer --------------------------------------------------------------------------------------------


class Connected(Event, frozen=True):
    connection: int


class Disconnected(Event, frozen=True):
    connection: int
    reason: str = ""


class MessageArrived(Event, frozen=True):
    connection: int
    message: LearnerMessage
    finite: bool | None = None  # of a Contribute or Seeded: what the driver found in the object
    norm: float | None = None
    problem: str | None = None  # the object is missing, short or malformed
    digests: list[str] = []  # of a Seeded: one a fragment


class Refusal(Event, frozen=True):
    """The transport turned somebody away before a machine saw a message (token, frame, size)."""

    reason: str
    detail: str  # of the last one
    count: int = 1  # how many since the last event of this reason


class MergeDone(Event, frozen=True):
    fragment: int
    version: int
    finite: bool
    norm: float
    digest: str
    merge_s: float


class StopRequested(Event, frozen=True):
    mode: Literal["suspend", "finish"]
    within_s: float | None = None  # for the learners to save or hand in; None: one lease


class CheckpointWritten(Event, frozen=True):
    pass


# ---- learner -------------------------------------------------------------------------------------------


class LinkUp(Event, frozen=True):
    pass


class LinkDown(Event, frozen=True):
    reason: str = ""


class Received(Event, frozen=True):
    message: SyncerMessage


class Reported(Event, frozen=True):
    report: AnyReport


class TrainerGone(Event, frozen=True):
    reason: str


class Fetched(Event, frozen=True):
    fragment: int
    version: int


class FetchFailed(Event, frozen=True):
    fragment: int
    version: int
    reason: str
    gone: bool = False  # the syncer no longer has it: a newer one was announced


class StateFetched(Event, frozen=True):
    transfer: str


class StateFetchFailed(Event, frozen=True):
    transfer: str
    reason: str


class Uploaded(Event, frozen=True):
    object: str
    transfer_s: float = 0.0
    sent_bytes: int = 0  # gossip: to partners since the last such event, as the transport counts


class UploadFailed(Event, frozen=True):
    object: str
    reason: str
    refusal: str = ""  # the other side's name for it; empty: it could not be reached
    sent_bytes: int = 0  # as of Uploaded


class Knocked(Event, frozen=True):
    """Gossip: a partner wants to send this object; answered by `Admit` before a byte of it is taken."""

    object: str


class RelayFailed(Event, frozen=True):
    """Gossip: what lay at the hub could not be fetched."""

    object: str
    reason: str


class Arrived(Event, frozen=True):
    """Gossip: a partner's vector lies whole and checked in the slot that the machine gave for it."""

    object: str
    num_bytes: int = 0  # from partners since the last such event, as the transport counts


SyncerEvent = (
    TimerFired | Connected | Disconnected | MessageArrived | Refusal | MergeDone
    | StopRequested | CheckpointWritten
)  # fmt: skip
LearnerEvent = (
    TimerFired | LinkUp | LinkDown | Received | Reported | TrainerGone | Fetched | FetchFailed
    | StateFetched | StateFetchFailed | Uploaded | UploadFailed | Arrived | Knocked | RelayFailed
)  # fmt: skip
