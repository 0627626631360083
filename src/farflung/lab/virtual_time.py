"""Time as a heap of moments: an hour passes as fast as its events can be handled."""

import heapq
import itertools
from collections.abc import Callable

from farflung.protocol.actions import SetTimer

What = Callable[[], None]


class VirtualTime:
    """Calls functions at their moment, in order of time and then of asking.

    >>> time, heard = VirtualTime(), []
    >>> time.after(3600.0, lambda: heard.append("later"))
    >>> time.after(0.0, lambda: heard.append("now"))
    >>> while time.step(): pass
    >>> heard, time.now
    (['now', 'later'], 3600.0)
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, What]] = []
        self._count = itertools.count()

    def after(self, delay_s: float, what: What) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._count), what))

    def step(self, until_s: float = float("inf")) -> bool:
        """Live through the next moment; False if there is none up to `until_s`."""
        if not self._heap or self._heap[0][0] > until_s:
            return False
        self.now, _, what = heapq.heappop(self._heap)
        what()
        return True


class Timers:
    """A machine's named timers: setting one again replaces it, setting it to None cancels it.

    Args:
        time: whose clock.
        fire: called with the name.
    """

    def __init__(self, time: VirtualTime, fire: Callable[[str], None]) -> None:
        self._time, self._fire = time, fire
        self._newest: dict[str, int] = {}

    def set(self, action: SetTimer) -> None:
        number = self._newest[action.name] = self._newest.get(action.name, 0) + 1
        if action.at_s is not None:
            self._time.after(max(0.0, action.at_s - self._time.now), lambda: self._ring(action.name, number))

    def _ring(self, name: str, number: int) -> None:
        if self._newest[name] == number:
            self._fire(name)
