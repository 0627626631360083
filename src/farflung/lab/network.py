"""Simulated links: latency, bandwidth, queueing, and uplinks that several learners share.

A learner's control messages see only latency and keep their order. Its bulk objects go one after the other, each
way on its own: an object starts when the line is free, occupies it for bytes / bandwidth and arrives a latency
later. Learners of one shared uplink also take turns on that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """One learner's connection to the syncer.

    Args:
        latency_s: one way.
        up_bps, down_bps: bits per second; infinity costs no time.
    """

    latency_s: float = 0.0
    up_bps: float = float("inf")
    down_bps: float = float("inf")

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.up_bps <= 0 or self.down_bps <= 0:
            raise ValueError(f"{self}: latency must not be negative, bandwidth must be above 0")


@dataclass(frozen=True, kw_only=True)
class SharedUplink:
    """A line that the uploads of several learners pass through, one at a time."""

    learners: Sequence[str]
    bps: float


@dataclass
class Network:
    """When what arrives. Asked in order of time.

    >>> network = Network({"a": LinkSpec(latency_s=0.1, up_bps=8000.0)})
    >>> network.bulk("a", "up", 1000, now=0.0), network.bulk("a", "up", 1000, now=0.5)
    (1.1, 2.1)
    """

    links: dict[str, LinkSpec]
    shared: Sequence[SharedUplink] = ()
    _free_s: dict[tuple[str, str], float] = field(default_factory=dict)
    _pairs: dict[tuple[str, tuple[str, str]], tuple[float, float]] = field(default_factory=dict)

    def control(self, learner: str, now: float) -> float:
        """When a control message sent now arrives."""
        return now + self.links[learner].latency_s

    def bulk(self, learner: str, direction: str, num_bytes: int, now: float) -> float:
        """When an object that is ready now has arrived; `direction` is up or down."""
        link = self.links[learner]
        bps = link.up_bps if direction == "up" else link.down_bps
        lines = [(learner, direction)]
        for number, uplink in enumerate(self.shared):
            if direction == "up" and learner in uplink.learners:
                lines.append((f"shared.{number}", "up"))
                bps = min(bps, uplink.bps)
        start = max([now, *(self._free_s.get(line, 0.0) for line in lines)])
        end = start + 8 * num_bytes / bps
        for line in lines:
            self._free_s[line] = end
        return end + link.latency_s

    def pair(self, name: str, sender: str, receiver: str, num_bytes: int, now: float) -> float:
        """When an object that goes from one learner straight to another has arrived.

        It starts when both lines are free and runs at the slower one's pace; the faster one is occupied only for
        what it would take itself. The longer latency counts, once.
        """
        up, down = self.links[sender], self.links[receiver]
        lines = {(sender, "up"): up.up_bps, (receiver, "down"): down.down_bps}
        start = max([now, *(self._free_s.get(line, 0.0) for line in lines)])
        for line, bps in lines.items():
            self._free_s[line] = start + 8 * num_bytes / bps
            self._pairs[name, line] = start, self._free_s[line]
        return start + 8 * num_bytes / min(lines.values()) + max(up.latency_s, down.latency_s)

    def release(self, name: str, sender: str, receiver: str, now: float) -> None:
        """A transfer of `pair` is over, or was given up: nobody waits for it any more."""
        for line in ((sender, "up"), (receiver, "down")):
            start, end = self._pairs.pop((name, line), (now, now))
            if self._free_s.get(line) == end:
                self._free_s[line] = min(end, max(now, start))

    def reset(self, learner: str) -> None:
        """A connection broke: what waited for its lines is gone."""
        for direction in ("up", "down"):
            self._free_s.pop((learner, direction), None)
