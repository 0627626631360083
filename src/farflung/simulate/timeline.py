"""An island's running spans as a clock: when will so much work be done?"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from farflung.simulate.life import Life


class Timeline:
    """Spans in which an island runs, from a moment of its life on.

    Args:
        spans: (from, until) in seconds, in order and apart from each other.

    >>> clock = Timeline([(0.0, 4.0), (10.0, 20.0)])
    >>> clock.after(3.0, 2.0), clock.after(5.0, 1.0), clock.running_s(0.0, 11.0)
    (11.0, 11.0, 5.0)
    """

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        self.starts_s = [start for start, _ in spans]
        self.ends_s = [end for _, end in spans]
        lengths = np.subtract(self.ends_s, self.starts_s)
        self._before_s: list[float] = np.concatenate([[0.0], np.cumsum(lengths)]).tolist()

    @classmethod
    def of(cls, life: Life, from_s: float) -> "Timeline":
        """What is left of a life after `from_s`, that moment being 0; spans that touch are joined."""
        spans: list[tuple[float, float]] = []
        for start, end in zip(life.starts_s, life.ends_s, strict=True):
            start, end = max(start - from_s, 0.0), end - from_s
            if end <= start:
                continue
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], end)
            else:
                spans.append((start, end))
        return cls(spans)

    def after(self, now: float, work_s: float) -> float:
        """When `work_s` running seconds will have passed since `now`; inf if that never comes."""
        at = bisect_right(self.ends_s, now)
        if at == len(self.ends_s):
            return float("inf")
        done = self._before_s[at] + max(0.0, now - self.starts_s[at]) + work_s
        span = bisect_left(self._before_s, done, lo=at + 1) - 1
        if span >= len(self.ends_s):
            return float("inf")
        return self.starts_s[span] + done - self._before_s[span]

    def running_s(self, start_s: float, end_s: float) -> float:
        """Running seconds between two moments."""
        return self._until(end_s) - self._until(start_s)

    def _until(self, moment_s: float) -> float:
        at = bisect_right(self.starts_s, moment_s) - 1
        if at < 0:
            return 0.0
        return self._before_s[at] + min(moment_s, self.ends_s[at]) - self.starts_s[at]

    def downs(self, horizon_s: float) -> list[tuple[float, float]]:
        """(from, until) of each time that it does not run before `horizon_s`."""
        found, before = [], 0.0
        for start, end in zip(self.starts_s, self.ends_s, strict=True):
            if start > before and before < horizon_s:
                found.append((before, start))
            before = end
        return [*found, (before, float("inf"))] if before < horizon_s else found
