"""Time as a heap of moments: an hour passes as fast as its events can be handled."""

import heapq
import itertools
from collections.abc import Callable

from farflung.protocol.actions import SetTimer

What = Callable[[], None]
ROUNDING_S = 1e-6  # of sums of times; less is not late


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
    """A node's clock and its machine's named timers: setting one again replaces it, None cancels it.

    Args:
        time: what the clock follows.
        fire: called with the name, and with how late it is.
        skew_s: how far the clock is ahead.
    """

    def __init__(self, time: VirtualTime, fire: Callable[[str, float], None], skew_s: float = 0.0) -> None:
        self._time, self._fire, self.skew_s = time, fire, skew_s
        self._newest: dict[str, int] = {}
        self._waiting: dict[str, float] = {}

    @property
    def now(self) -> float:
        """What the node's clock says."""
        return self._time.now + self.skew_s

    def set(self, action: SetTimer) -> None:
        number = self._newest[action.name] = self._newest.get(action.name, 0) + 1
        self._waiting.pop(action.name, None)
        if action.at_s is not None:
            self._waiting[action.name] = action.at_s
            self._time.after(max(0.0, action.at_s - self.now), lambda: self._ring(action.name, number))

    def jump(self, by_s: float) -> None:
        """The clock leaps ahead: what is due now rings, late."""
        self.skew_s += by_s
        for name, at_s in sorted(self._waiting.items(), key=lambda item: item[1]):
            self.set(SetTimer(name=name, at_s=at_s))

    def cancel_all(self) -> None:
        for name in [*self._waiting]:
            self.set(SetTimer(name=name, at_s=None))

    def _ring(self, name: str, number: int) -> None:
        if self._newest[name] == number:
            late_s = self.now - self._waiting.pop(name)
            self._fire(name, late_s if late_s > ROUNDING_S else 0.0)
