"""What a machine asks its driver to do: imperative, scalars only."""

from typing import Any

import msgspec

from farflung.protocol.mailbox import AnyCommand
from farflung.protocol.messages import LearnerMessage, SyncerMessage


class Action(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    pass


class SetTimer(Action):
    """Fire `TimerFired(name)` at `at_s`; a second one of this name replaces the first. None cancels."""

    name: str
    at_s: float | None


class Note(Action):
    """Something a person should be able to count or read: a rejoin, a refusal, a wait and its reason."""

    kind: str
    data: dict[str, Any] = {}


# ---- syncer --------------------------------------------------------------------------------------------


class Send(Action):
    connection: int
    message: SyncerMessage


class HangUp(Action):
    connection: int


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One contribution of a merge; parts come in sorted learner order."""

    object: str
    learner: str
    base_version: int
    weight: float  # normalised: the weights of a merge sum to 1


class CommitSeed(Action):
    """Make the uploaded fragments version 0."""

    objects: list[str]


class Merge(Action):
    """Produce `version` of a fragment from the present one and these parts, checked finite, then committed.

    If the result is not finite the present value and outer state are committed unchanged.
    """

    fragment: int
    version: int
    parts: list[Part]
    final: bool = False  # plain weighted average, outer optimizer left out


class Discard(Action):
    """Free the buffer of a contribution that will not be merged."""

    object: str


class Retire(Action):
    """Nobody may use this version as a base any more."""

    fragment: int
    version: int


class DiscardState(Action):
    transfer: str


class WriteCheckpoint(Action):
    pass


class Finished(Action):
    reason: str  # finished, suspended


# ---- learner -------------------------------------------------------------------------------------------


class Say(Action):
    message: LearnerMessage


class Post(Action):
    command: AnyCommand


class Fetch(Action):
    """Download a version into the fragment's downlink slot."""

    fragment: int
    version: int


class FetchState(Action):
    transfer: str
    num_bytes: int
    digest: str


class Upload(Action):
    """Send a slot: fragment `fragment` of the uplink, the downlink (seed) or the state slot (fragment None)."""

    object: str
    fragment: int | None
    num_bytes: int
    seed: bool = False


class CancelUpload(Action):
    object: str


class Connect(Action):
    """Open the control link again (the driver backs off)."""


class Exit(Action):
    reason: str
    ok: bool


SyncerAction = (
    SetTimer | Note | Send | HangUp | CommitSeed | Merge | Discard | Retire | DiscardState
    | WriteCheckpoint | Finished
)  # fmt: skip
LearnerAction = (
    SetTimer | Note | Say | Post | Fetch | FetchState | Upload | CancelUpload | Connect | Exit
)  # fmt: skip
