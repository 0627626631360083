"""What happens to a machine: past tense, scalars only, written to the tape before the actions it causes."""

from typing import Literal

import msgspec

from farflung.protocol.mailbox import AnyReport
from farflung.protocol.messages import LearnerMessage, SyncerMessage


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    pass


class TimerFired(Event):
    name: str
    late_s: float = 0.0  # how late the driver itself was: credited to every lease


# ---- syncer --------------------------------------------------------------------------------------------


class Connected(Event):
    connection: int


class Disconnected(Event):
    connection: int
    reason: str = ""


class MessageArrived(Event):
    connection: int
    message: LearnerMessage
    finite: bool | None = None  # of a Contribute or Seeded: what the driver found in the object
    norm: float | None = None
    problem: str | None = None  # the object is missing, short or malformed
    digests: list[str] = []  # of a Seeded: one a fragment


class Refusal(Event):
    """The transport turned somebody away before a machine saw a message (token, frame, size)."""

    reason: str
    detail: str


class MergeDone(Event):
    fragment: int
    version: int
    finite: bool
    norm: float
    digest: str
    merge_s: float


class StopRequested(Event):
    mode: Literal["suspend", "finish"]


class CheckpointWritten(Event):
    pass


# ---- learner -------------------------------------------------------------------------------------------


class LinkUp(Event):
    pass


class LinkDown(Event):
    reason: str = ""


class Received(Event):
    message: SyncerMessage


class Reported(Event):
    report: AnyReport


class TrainerGone(Event):
    reason: str


class Fetched(Event):
    fragment: int
    version: int


class FetchFailed(Event):
    fragment: int
    version: int
    reason: str
    gone: bool = False  # the syncer no longer has it: a newer one was announced


class StateFetched(Event):
    transfer: str


class StateFetchFailed(Event):
    transfer: str
    reason: str


class Uploaded(Event):
    object: str
    transfer_s: float = 0.0


class UploadFailed(Event):
    object: str
    reason: str


SyncerEvent = (
    TimerFired | Connected | Disconnected | MessageArrived | Refusal | MergeDone
    | StopRequested | CheckpointWritten
)  # fmt: skip
LearnerEvent = (
    TimerFired | LinkUp | LinkDown | Received | Reported | TrainerGone | Fetched | FetchFailed
    | StateFetched | StateFetchFailed | Uploaded | UploadFailed
)  # fmt: skip
