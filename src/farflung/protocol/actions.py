"""What a machine asks its driver to do: imperative, scalars only."""

from typing import Any

import msgspec

from farflung.protocol.mailbox import AnyCommand
from farflung.protocol.messages import LearnerMessage, SyncerMessage


class Action(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    pass


class SetTimer(Action, frozen=True):
    """Fire `TimerFired(name)` at `at_s`; a second one of this name replaces the first. None cancels."""

    name: str
    at_s: float | None


class Note(Action, frozen=True):
    """Something a person should be able to count or read: a rejoin, a refusal, a wait and its reason."""

    kind: str
    data: dict[str, Any] = {}


# ---- syncer --------------------------------------------------------------------------------------------


class Send(Action, frozen=True):
    connection: int
    message: SyncerMessage


class HangUp(Action, frozen=True):
    connection: int


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One contribution of a merge; parts come in sorted learner order."""

    object: str
    learner: str
    base_version: int
    weight: float  # normalised: the weights of a merge sum to 1
    scale: float | None = None  # the contribution is cut down by this, before it is anchored


class CommitSeed(Action, frozen=True):
    """Make the uploaded fragments version 0."""

    objects: list[str]


class Merge(Action, frozen=True):
    """Produce `version` of a fragment from the present one and these parts, checked finite, then committed.

    If the result is not finite the present value and outer state are committed unchanged.
    """

    fragment: int
    version: int
    parts: list[Part]
    final: bool = False  # plain weighted average, outer optimizer left out


class Discard(Action, frozen=True):
    """Free the buffer of a contribution that will not be merged."""

    object: str


class Retire(Action, frozen=True):
    """Nobody may use this version as a base any more."""

    fragment: int
    version: int


class DiscardState(Action, frozen=True):
    transfer: str


class WriteCheckpoint(Action, frozen=True):
    pass


class Finished(Action, frozen=True):
    reason: str  # finished, suspended


# ---- learner -------------------------------------------------------------------------------------------


class Say(Action, frozen=True):
    message: LearnerMessage


class Post(Action, frozen=True):
    command: AnyCommand


class Fetch(Action, frozen=True):
    """Download a version into the fragment's downlink slot. A newer `Fetch` of the fragment replaces this one.

    With `base_version` only what leads there from that one, which the learner holds.
    """

    fragment: int
    version: int
    base_version: int | None = None


class FetchState(Action, frozen=True):
    transfer: str
    num_bytes: int
    digest: str


class Upload(Action, frozen=True):
    """Send a slot: fragment `fragment` of the uplink, the downlink (seed) or the state slot (fragment None)."""

    object: str
    fragment: int | None
    num_bytes: int
    seed: bool = False


class Offer(Action, frozen=True):
    """Gossip: send uplink slot 0 to a partner, directly; answered by `Uploaded` or `UploadFailed`."""

    object: str
    partner: str
    address: str
    num_bytes: int


class Admit(Action, frozen=True):
    """Gossip: take the object into this downlink slot, or (None) turn it away by this name."""

    object: str
    slot: int | None
    refusal: str = ""


class FetchRelay(Action, frozen=True):
    """Gossip: fetch an object from the hub into this downlink slot."""

    object: str
    num_bytes: int
    slot: int


class Unexpect(Action, frozen=True):
    """Gossip: let go of the slot of an object that is arriving, or may: nothing of it is written any more."""

    object: str


class CancelUpload(Action, frozen=True):
    object: str


class Connect(Action, frozen=True):
    """Open the control link again (the driver backs off)."""


class Exit(Action, frozen=True):
    reason: str
    ok: bool


SyncerAction = (
    SetTimer | Note | Send | HangUp | CommitSeed | Merge | Discard | Retire | DiscardState
    | WriteCheckpoint | Finished
)  # fmt: skip
LearnerAction = (
    SetTimer | Note | Say | Post | Fetch | FetchState | Upload | CancelUpload | Offer | Admit | FetchRelay
    | Unexpect | Connect | Exit
)  # fmt: skip
