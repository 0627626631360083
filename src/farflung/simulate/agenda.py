"""Moments in order: a heap, and the time of the one that is happening."""

import heapq
from collections.abc import Callable

What = Callable[[], None]


class Agenda:
    """
    >>> agenda, seen = Agenda(), []
    >>> agenda.after(2.0, lambda: seen.append(agenda.now))
    >>> agenda.after(1.0, lambda: agenda.after(0.5, lambda: seen.append(agenda.now)))
    >>> agenda.run_until(10.0)
    >>> seen, agenda.now
    ([1.5, 2.0], 10.0)
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, What]] = []
        self._count = 0

    def after(self, delay_s: float, what: What) -> None:
        """Let something happen `delay_s` from now; equal moments keep their order; never, if that is inf."""
        if delay_s < float("inf"):
            self._count += 1
            heapq.heappush(self._heap, (self.now + delay_s, self._count, what))

    def run_until(self, horizon_s: float) -> None:
        """Everything that happens before the horizon."""
        while self._heap and self._heap[0][0] <= horizon_s:
            self.now, _, what = heapq.heappop(self._heap)
            what()
        self.now = horizon_s
