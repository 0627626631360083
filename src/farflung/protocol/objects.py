"""Names of bulk objects: what `PUT /objects/NAME` and `GET /objects/NAME` carry."""

import re
from functools import lru_cache

_INDEX = re.compile(r"0|[1-9][0-9]{0,3}")  # of a fragment
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")  # names come from others: each number has one form, and an end


def contribution(learner: str, incarnation: int, fragment: int, round: int) -> str:
    return f"contribution.{learner}.{incarnation}.{fragment}.{round}"


def fragment(index: int, version: int) -> str:
    return f"fragment.{index}.{version}"


def increments(index: int, base_version: int, version: int) -> str:
    """What leads from one version of a fragment to another."""
    return f"increments.{index}.{base_version}.{version}"


def download(index: int, version: int, base_version: int | None) -> str:
    """What a learner fetches to get to a version: the whole, or what leads there from its own."""
    if base_version is None:
        return fragment(index, version)
    return increments(index, base_version, version)


def seed(learner: str, incarnation: int, index: int) -> str:
    return f"seed.{learner}.{incarnation}.{index}"


def offer(epoch: int, round: int, sender: str, receiver: str) -> str:
    """Gossip: a vector on its way to a partner. Names hold no dot."""
    return f"offer.{epoch}.{round}.{sender}.{receiver}"


@lru_cache(maxsize=4096)
def parse_offer(name: str) -> tuple[int, int, str, str] | None:
    """(epoch, round, sender, receiver) of `offer`, or None if it is not written just so.

    >>> parse_offer(offer(2, 31, "a", "b")), parse_offer("offer.2.031.a.b")
    ((2, 31, 'a', 'b'), None)
    """
    kind, *fields = name.split(".")
    if kind != "offer" or len(fields) != 4 or not all(_NUMBER.fullmatch(field) for field in fields[:2]):
        return None
    return int(fields[0]), int(fields[1]), fields[2], fields[3]


def state(transfer: str) -> str:
    return f"state.{transfer}"


def kind_and_fragment(name: str) -> tuple[str, int]:
    """What an object is, and of which fragment: for counters, so any name has an answer.

    Kinds are contribution, version, increment, seed, offer, state and other; what has no fragment says 0.

    >>> kind_and_fragment(contribution("a", 1, 3, 20)), kind_and_fragment(fragment(2, 7))
    (('contribution', 3), ('version', 2))
    """
    kind, *fields = name.split(".")
    if kind in ("offer", "state"):
        return kind, 0
    known, place = _KINDS.get(kind, ("", 0))
    if not known or place >= len(fields) or not _INDEX.fullmatch(fields[place]):
        return "other", 0
    return known, int(fields[place])


_KINDS = {  # by the first word of a name: kind, and which field behind it is the fragment
    "contribution": ("contribution", 2), "seed": ("seed", 2), "fragment": ("version", 0),
    "increments": ("increment", 0),
}  # fmt: skip
