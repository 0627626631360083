"""Named timers on an event loop: a second one of a name replaces the first."""

import asyncio
from collections.abc import Callable


class Timers:
    """Calls `fire(name, late_s)` at the asked moments of a clock that the caller defines."""

    def __init__(self, clock: Callable[[], float], fire: Callable[[str, float], None]) -> None:
        self._clock, self._fire = clock, fire
        self._handles: dict[str, asyncio.TimerHandle] = {}

    def set(self, name: str, at_s: float | None) -> None:
        """Fire at `at_s` of the clock; None cancels."""
        handle = self._handles.pop(name, None)
        if handle is not None:
            handle.cancel()
        if at_s is not None:
            delay_s = max(0.0, at_s - self._clock())
            self._handles[name] = asyncio.get_running_loop().call_later(delay_s, self._due, name, at_s)

    def cancel_all(self) -> None:
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()

    def _due(self, name: str, at_s: float) -> None:
        del self._handles[name]
        self._fire(name, max(0.0, self._clock() - at_s))
