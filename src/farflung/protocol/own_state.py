"""A learner's own method state after a crash: what it kept on its disk, and whether it may go on with that.

Own is what no other learner has: the buffer of what was not sent, a momentum, the last correction. A new process
of a learner says what it found (`OwnState`), in numbers and digests; the hub knows how its last life ended
(`Life`) and decides. What is not taken over begins afresh, at zero.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

MISSING = "missing"  # nothing was found
DAMAGED = "damaged"  # found, and its digest is not that of its content
RESET = "reset"  # its owner's numbers were broken: nothing of them is used again


class OwnFragment(msgspec.Struct, frozen=True, kw_only=True):
    """One fragment's own state, in digests (xxh3-128)."""

    digest: str
    round: int | None = None  # of a contribution whose fate was not known
    pending: str = ""  # digest of the state that holds if it was merged


class OwnState(msgspec.Struct, frozen=True, kw_only=True):
    """What a process found of its learner's own state. `problem` names why there is nothing to be had."""

    run: str = ""
    incarnation: int = 0
    step: int = 0  # own, when it was kept
    fragments: list[OwnFragment] = []
    problem: str = ""


@dataclass
class Life:
    """The last incarnation of a learner that was proven, as far as the hub heard of it."""

    incarnation: int
    step: int  # own, of its last boundary
    included: list[int | None] = field(
        default_factory=list
    )  # a fragment: round of its last merged contribution


def refusal(
    own: OwnState,
    life: Life | None,
    *,
    run: str,
    incarnation: int,
    sync_every_steps: int,
    waiting: Collection[tuple[int, int]],
) -> str:
    """Why a learner must not go on with what it kept, as a name; empty: it may.

        damaged, missing, reset   its process says so
        run                       of another run
        lineage                   not of the life that ended last, or behind what was merged of it
        old                       more than H own steps passed between keeping it and the last that was heard
        undecided                 a contribution of that life still waits for its fate: which of two states holds?

    Args:
        own: what its new process found.
        life: how the last life ended; None: there was none.
        run: this run.
        incarnation: of the new process. A life that ended before it was proven may have kept it once more.
        sync_every_steps: H, of this learner.
        waiting: (fragment, round) of its contributions in open rounds.

    >>> own = OwnState(run="r", incarnation=1, step=8, fragments=[OwnFragment(digest="d")])
    >>> known = {"run": "r", "incarnation": 2, "sync_every_steps": 4, "waiting": ()}
    >>> refusal(own, Life(1, 12, [None]), **known), refusal(own, Life(1, 13, [None]), **known)
    ('', 'old')
    """
    if own.problem:
        return own.problem
    if own.run != run:
        return "run"
    if life is None or not life.incarnation <= own.incarnation < incarnation:
        return "lineage"
    if len(own.fragments) != len(life.included):
        return "lineage"
    if any(_behind(one, last) for one, last in zip(own.fragments, life.included, strict=True)):
        return "lineage"
    if life.step - own.step > sync_every_steps:
        return "old"
    if any((p, one.round) in waiting for p, one in enumerate(own.fragments)):
        return "undecided"
    return ""


def merged(own: OwnState, life: Life) -> list[bool]:
    """A fragment: whether the contribution whose fate was not known was merged."""
    return [
        one.round is not None and one.round == last
        for one, last in zip(own.fragments, life.included, strict=True)
    ]


def expected(own: OwnState, life: Life) -> list[str]:
    """Digests of the state that a learner must hold once it has taken over what it kept."""
    return [
        one.pending if sent else one.digest
        for one, sent in zip(own.fragments, merged(own, life), strict=True)
    ]


def _behind(one: OwnFragment, last: int | None) -> bool:
    return one.round is not None and last is not None and last > one.round
