"""What a fault plan does to one learner's link, in virtual time.

A link stays first in, first out, and reliable until it is lost: what a partition holds back arrives after it.
"""

from dataclasses import dataclass, field
from math import inf


@dataclass
class LinkTrouble:
    """Without any, every answer is that of an undisturbed link.

    >>> trouble = LinkTrouble()
    >>> trouble.bulk_s("up", 10**6, 0.5, now=0.0)
    0.5
    >>> trouble.throttle(8e6, until_s=10.0)
    >>> trouble.bulk_s("up", 10**6, 0.5, now=0.0), trouble.bulk_s("up", 10**6, 0.5, now=0.0)
    (1.0, 2.0)
    """

    duplicates: int = 0  # contributions still to be sent twice
    damaged: dict[str, int] = field(
        default_factory=lambda: {"up": 0, "down": 0}
    )  # chunks still to be damaged
    caught: int = 0  # damaged chunks that were noticed and sent again
    _blocked_s: dict[str, float] = field(default_factory=lambda: {"up": -inf, "down": -inf})
    _delays: list[tuple[float, float]] = field(default_factory=list)  # (until, more latency)
    _throttles: list[tuple[float, float]] = field(default_factory=list)  # (until, bits per second)
    _free_s: dict[str, float] = field(default_factory=dict)  # when the throttled line is free again

    def block(self, direction: str, until_s: float) -> None:
        """Nothing passes in this direction, or in both."""
        for way in ways(direction):
            self._blocked_s[way] = max(self._blocked_s[way], until_s)

    def delay(self, latency_s: float, until_s: float) -> None:
        self._delays.append((until_s, latency_s))

    def throttle(self, bps: float, until_s: float) -> None:
        self._throttles.append((until_s, bps))

    def damage(self, direction: str, count: int) -> None:
        """The next `count` bulk objects are damaged on their way."""
        for way in ways(direction):
            self.damaged[way] += count

    # ---- asked by the link ---------------------------------------------------------------------------

    def dead(self, now: float) -> bool:
        """Whether a request gets no answer: that takes both ways."""
        return now < max(self._blocked_s.values())

    def sent_s(self, direction: str, now: float) -> float:
        """When a message that is ready now leaves."""
        return max(now, self._blocked_s[direction])

    def extra_s(self, now: float) -> float:
        """Latency beside the usual one."""
        return (
            0.0
            if not self._delays
            else sum(latency_s for until_s, latency_s in self._delays if now < until_s)
        )

    def bulk_s(self, direction: str, num_bytes: int, usual_s: float, now: float) -> float:
        """Seconds until an object that is ready now has arrived, in place of `usual_s`."""
        bps = min((bps for until_s, bps in self._throttles if now < until_s), default=inf)
        if bps < inf:
            start_s = max(now, self._free_s.get(direction, 0.0))
            self._free_s[direction] = start_s + 8 * num_bytes / bps
            usual_s = max(usual_s, self._free_s[direction] - now)
        return usual_s + self.extra_s(now)

    def spoils(self, direction: str) -> bool:
        """Whether the object that has just arrived is damaged; its checksum tells, and it is sent again."""
        if not self.damaged[direction]:
            return False
        self.damaged[direction] -= 1
        self.caught += 1
        return True

    def repeats(self) -> bool:
        """Whether the contribution that is being sent is sent twice."""
        if not self.duplicates:
            return False
        self.duplicates -= 1
        return True


def ways(direction: str) -> tuple[str, ...]:
    """ "both" is up and down."""
    return ("up", "down") if direction == "both" else (direction,)
