"""What is to be planned for: a model, islands, their links and failures, and how much is to be trained."""

import math
from dataclasses import dataclass, field

from farflung.errors import UserError
from farflung.simulate.cluster import Cluster, require
from farflung.simulate.returns import Returns
from farflung.simulate.scenario import Links


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Equal islands with equal links.

    Args:
        params: of the model.
        islands: places that train by themselves.
        chips: of one island.
        step_s: seconds of an island's inner step.
        slowest: how much longer a step of one island takes; 0.18: 18 % slower.
        jitter: relative standard deviation of a step's time.
        tokens_per_step: of one island.
        budget_tokens: of the whole run.
        up_mbps, down_mbps: of an island's link, Mbit/s.
        hub_mbps: of the syncer's own line, each way, which all learners share.
        latency_s: one way.
        merge_s: of a merge at the syncer.
        mtbi_s: mean time between interruptions of one chip, seconds; inf: they never fail.
        away_s: mean time until failed chips are back.
        stands_s: that a learner stands to go on without chips, or to take them in again.
        elastic: a learner goes on without failed chips; else it waits for all of them.

    Raises:
        UserError: a value that cannot be.
    """

    params: float
    islands: int = 8
    chips: int = 1
    step_s: float = 1.0
    slowest: float = 0.0
    jitter: float = 0.0
    tokens_per_step: float = 1.0
    budget_tokens: float = 1.0
    up_mbps: float = math.inf
    down_mbps: float = math.inf
    hub_mbps: float = math.inf
    latency_s: float = 0.0
    merge_s: float = 0.0
    mtbi_s: float = math.inf
    away_s: float = field(default=62.0)
    stands_s: float = 15.0
    elastic: bool = True

    def __post_init__(self) -> None:
        for name in ("islands", "chips"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("params", "step_s", "tokens_per_step", "budget_tokens", "away_s"):
            value = getattr(self, name)
            require(0 < value < math.inf, name, value, "above 0")
        for name in ("up_mbps", "down_mbps", "hub_mbps"):
            require(getattr(self, name) > 0, name, getattr(self, name), "above 0 (Mbit/s)")
        for name in ("slowest", "jitter", "latency_s", "merge_s", "stands_s"):
            value = getattr(self, name)
            require(0 <= value < math.inf, name, value, "at least 0")
        require(self.mtbi_s > 0, "mtbi_s", self.mtbi_s, "above 0")

    def parts(self, learners: int) -> int:
        """Learners of one island.

        Raises:
            UserError: `learners` is not a multiple of the islands, or more than the chips.
        """
        parts, rest = divmod(learners, self.islands)
        if rest or not parts:
            raise UserError(
                f"learners (M) = {learners}: must be a multiple of the {self.islands} islands, each cut into parts"
            )
        require(
            parts <= self.chips, "learners (M)", learners, f"at most {self.islands * self.chips}, one a chip"
        )
        return parts

    def cluster(self) -> Cluster:
        """All chips, as the simulator wants them."""
        return Cluster(
            chips=self.islands * self.chips, mtbi_s=self.mtbi_s, returns=Returns.of_mean(self.away_s),
            down_s=self.stands_s, up_s=self.stands_s, elastic=self.elastic,
        )  # fmt: skip

    def links(self, learners: int) -> Links:
        """Of one learner where all send at once: its part of its island's link, or of the syncer's line."""
        parts = self.parts(learners)
        up, down = (min(x / parts, self.hub_mbps / learners) for x in (self.up_mbps, self.down_mbps))
        return Links(
            params=self.params, up_mbps=up, down_mbps=down, latency_s=self.latency_s, merge_s=self.merge_s
        )

    def partner_links(self, learners: int) -> Links:
        """The same between two learners: no hub, and the slower direction counts."""
        mbps = min(self.up_mbps, self.down_mbps) / self.parts(learners)
        return Links(params=self.params, up_mbps=mbps, down_mbps=mbps, latency_s=self.latency_s)

    def hub_binds(self, learners: int, direction: str) -> bool:
        """Whether the syncer's line is what bounds a learner's transfers."""
        own = self.up_mbps if direction == "up" else self.down_mbps
        return self.hub_mbps / learners < own / self.parts(learners)
