"""How much is reachable from an object, by path: a soak compares two moments, and what grew has a name."""

from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

Census = dict[str, int]
"""Path: how many entries or bytes lie there. All entries of one container share the path ``[*]``."""

_BYTES = (bytes, bytearray, memoryview)
_SEVERAL = (list, tuple, set, frozenset, deque)


def census(*roots: Any) -> Census:
    """Count what is reachable through attributes and containers. Objects of other packages are not looked into.

    >>> from farflung.core.quorum import Ema
    >>> census({"a": [1, 2], "b": [3]}, Ema())
    {'': 2, '[*]': 3}
    """
    counted: Census = {}
    seen: dict[int, Any] = {}
    waiting: deque[tuple[str, Any]] = deque(("", root) for root in roots)
    while waiting:
        path, item = waiting.popleft()
        inside = _inside(item)
        if inside is None and not isinstance(item, _BYTES):
            continue
        if inside is not None:
            if id(item) in seen:
                continue
            seen[id(item)] = item
        if inside is None or isinstance(item, (dict, *_SEVERAL)):
            counted[path] = counted.get(path, 0) + len(item)
        waiting.extend((f"{path}{step}", part) for step, part in inside or ())
    return counted


def _inside(item: Any) -> list[tuple[str, Any]] | None:
    """What lies in something, each with its step of a path; None: nothing that is looked into."""
    if isinstance(item, dict):
        return [("[*]", part) for part in item.values()]
    if isinstance(item, _SEVERAL):
        return [("[*]", part) for part in item]
    if isinstance(item, type) or not type(item).__module__.startswith("farflung."):
        return None
    if isinstance(item, msgspec.Struct):
        names: Iterable[str] = item.__struct_fields__
    else:
        slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
        names = [*getattr(item, "__dict__", ()), *slots]
    return [(f".{name}", getattr(item, name)) for name in names if hasattr(item, name)]


def peak(censuses: Iterable[Census]) -> Census:
    """The most of each path."""
    most: Census = {}
    for one in censuses:
        for path, count in one.items():
            most[path] = max(count, most.get(path, 0))
    return most


def grown(early: Census, late: Census, factor: float = 1.5, beyond: int = 8) -> dict[str, tuple[int, int]]:
    """Paths with more than `factor` times as much as before and `beyond`, and how much then and now.

    >>> grown({"a": 4, "b": 4}, {"a": 14, "b": 15})
    {'b': (4, 15)}
    """
    return {
        path: (early.get(path, 0), count)
        for path, count in sorted(late.items())
        if count > factor * early.get(path, 0) + beyond
    }
