"""Bytes as they pass a transport, by learner, kind of object and fragment: one meaning for run and lab."""

from collections.abc import Iterable
from typing import Any

from farflung.protocol.objects import kind_and_fragment

Row = dict[str, Any]
"""``learner, kind, fragment, up, down``; up is what the learner sent."""


class ByteTable:
    """Counts. Bodies with their frame headers, retries included.

    >>> table = ByteTable()
    >>> table.count("a", "contribution.a.1.0.7", up=136)
    >>> table.rows()
    [{'learner': 'a', 'kind': 'contribution', 'fragment': 0, 'up': 136, 'down': 0}]
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, int], list[int]] = {}

    def count(self, learner: str, object_name: str, *, up: int = 0, down: int = 0) -> None:
        """An object's bytes passed."""
        self.add(learner, *kind_and_fragment(object_name), up, down)

    def add(self, learner: str, kind: str, fragment: int, up: int, down: int) -> None:
        counts = self._counts.setdefault((learner, kind, fragment), [0, 0])
        counts[0] += up
        counts[1] += down

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Add what `rows` gave, of another table or an earlier process."""
        for row in rows:
            self.add(row["learner"], row["kind"], row["fragment"], row["up"], row["down"])

    def rows(self) -> list[Row]:
        """Sorted by learner, kind, fragment; what is zero both ways is left out."""
        return [
            {"learner": learner, "kind": kind, "fragment": fragment, "up": up, "down": down}
            for (learner, kind, fragment), (up, down) in sorted(self._counts.items())
            if up or down
        ]

    @property
    def bytes_up(self) -> int:
        return sum(up for up, _ in self._counts.values())

    @property
    def bytes_down(self) -> int:
        return sum(down for _, down in self._counts.values())
