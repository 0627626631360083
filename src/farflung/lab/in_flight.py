"""Bulk objects on their way over one island's line, one direction: what of one has passed when it is given up."""

from dataclasses import dataclass, field


@dataclass
class InFlight:
    """First in, first out, as the line itself.

    >>> line = InFlight()
    >>> line.begin("a", 1000, now=0.0, takes_s=1.0)
    >>> line.begin("b", 1000, now=0.5, takes_s=1.5)  # it waits until a is over
    >>> line.end("b", now=1.25), line.end("a", now=1.25), line.end("a", now=1.25)
    (250, 1000, 0)
    """

    _free_s: float = 0.0
    _objects: dict[str, tuple[int, float, float]] = field(default_factory=dict)  # bytes, from, until

    def begin(self, name: str, num_bytes: int, now: float, takes_s: float) -> None:
        """An object that is ready now will have arrived after so many seconds, its wait for the line included."""
        start_s = min(max(now, self._free_s), now + takes_s)
        self._free_s = max(self._free_s, now + takes_s)
        self._objects[name] = num_bytes, start_s, now + takes_s

    def end(self, name: str, now: float) -> int:
        """It has arrived, or is given up: how many of its bytes have passed."""
        num_bytes, start_s, until_s = self._objects.pop(name, (0, 0.0, 0.0))
        if now >= until_s:
            return num_bytes
        return int(num_bytes * (now - start_s) / (until_s - start_s)) if now > start_s else 0

    def end_all(self, now: float) -> dict[str, int]:
        """The line is lost: what has passed of everything on its way."""
        return {name: self.end(name, now) for name in list(self._objects)}
