"""Names of bulk objects: what `PUT /objects/NAME` and `GET /objects/NAME` carry."""

import re
from functools import lru_cache

_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")  # names come from others: each number has one form, and an end


def contribution(learner: str, incarnation: int, fragment: int, round: int) -> str:
    return f"contribution.{learner}.{incarnation}.{fragment}.{round}"


def fragment(index: int, version: int) -> str:
    return f"fragment.{index}.{version}"


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
