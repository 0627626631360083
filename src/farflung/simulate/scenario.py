"""A method on a cluster: everything that a simulation is a function of, beside its seed."""

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from farflung.core.codecs import get_codec
from farflung.core.traffic import FP32_BYTES, framed_bytes
from farflung.errors import UserError, did_you_mean
from farflung.methods import METHODS
from farflung.protocol.policy import Policy
from farflung.simulate.cluster import Cluster, require

MethodName = Literal["data_parallel", "diloco", "streaming", "decoupled", "gasloc"]
METHOD_NAMES: tuple[str, ...] = get_args(MethodName)


@dataclass(frozen=True, kw_only=True)
class Links:
    """Between an island and the syncer, or another island.

    Args:
        params: of the model; 0: transfers cost no time and no bytes.
        up_mbps, down_mbps: of one island, Mbit/s; inf: transfers cost no time.
        latency_s: one way.
        merge_s: of a merge at the syncer.

    Raises:
        UserError: a value that cannot be.
    """

    params: float = 0.0
    up_mbps: float = math.inf
    down_mbps: float = math.inf
    latency_s: float = 0.0
    merge_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("up_mbps", "down_mbps"):
            require(getattr(self, name) > 0, name, getattr(self, name), "above 0 (Mbit/s)")
        for name in ("params", "latency_s", "merge_s"):
            require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "at least 0")

    def up_s(self, num_bytes: float) -> float:
        return 8e-6 * num_bytes / self.up_mbps

    def down_s(self, num_bytes: float) -> float:
        return 8e-6 * num_bytes / self.down_mbps


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is simulated.

    Args:
        method: data_parallel, diloco, streaming, decoupled or gasloc.
        learners: M, islands; data_parallel is one job over all chips and wants 1.
        cluster: chips and failures.
        policy: of the method, K, H, P, tau, ... and codec; None: its defaults. data_parallel has none.
        step_s: seconds of an inner step of an island whose chips are of average speed.
        slowest: how much longer a step of one island takes than of the others; 0.18: "18 % slower".
        jitter: standard deviation of a step's time, relative; no step takes less than a fifth of its time.
        links: of every island; data_parallel has none.
        tokens_per_step: of one island.

    Raises:
        UserError: a value that cannot be, an unknown method, or K > M.
    """

    method: str
    learners: int
    cluster: Cluster
    policy: Policy | None = None
    step_s: float = 1.0
    slowest: float = 0.0
    jitter: float = 0.0
    links: Links = field(default_factory=Links)
    tokens_per_step: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in METHOD_NAMES:
            raise UserError(
                f"method = {self.method!r} cannot be simulated{did_you_mean(self.method, METHOD_NAMES)}"
            )
        require(self.learners >= 1, "learners", self.learners, "at least 1")
        self.cluster.island(self.learners)
        require(0 < self.step_s < math.inf, "step_s", self.step_s, "above 0")
        for name in ("slowest", "jitter", "tokens_per_step"):
            require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "at least 0")
        if self.method == "data_parallel":
            require(
                self.learners == 1,
                "learners",
                self.learners,
                "1 with method = data_parallel: one job over all chips",
            )
            require(self.policy is None, "policy", "given", "absent with method = data_parallel")
            self._refuse_links()
        elif self.policy is None:
            object.__setattr__(self, "policy", policy_of(self.method, {}))
        else:
            require(self.policy.method == self.method, "policy.method", self.policy.method, repr(self.method))
        if self.policy is not None and self.policy.quorum != "all":
            K = self.policy.quorum
            require(self.learners >= K, "quorum (K)", K, f"at most the {self.learners} learners (M)")

    def _refuse_links(self) -> None:
        """A job over all chips has no island's link: what its reductions need is the preset `bandwidth`."""
        for link in fields(Links):
            value = getattr(self.links, link.name)
            if value != link.default:
                raise UserError(
                    f"{link.name} = {value:g}: no effect with method = data_parallel (see the preset bandwidth)"
                )

    @property
    def rules(self) -> Policy:
        """The policy of a method that has one."""
        assert self.policy is not None, "data_parallel has no policy"
        return self.policy

    @property
    def quorum(self) -> int:
        """K as a number, for uptime."""
        quorum = 1 if self.policy is None else self.policy.quorum
        return self.learners if quorum == "all" else int(quorum)

    def step_times_s(self) -> list[float]:
        """Mean step time of each island."""
        return [self.step_s] * (self.learners - 1) + [self.step_s * (1 + self.slowest)]

    @property
    def up_bytes(self) -> int:
        """Of one contribution: a fragment as its codec packs it, in its frames."""
        return framed_bytes(get_codec(self.rules.codec).size_bytes(self.elements)) if self.elements else 0

    def down_bytes(self, behind: int | None = None) -> int:
        """Of a fragment's newest version, in its frames.

        Args:
            behind: versions from the learner's own to it: increments lead there, if the method has them and they
                are fewer bytes; None: the learner has no version, and fetches fp32 state.
        """
        num_bytes, codec = FP32_BYTES * self.elements, self.rules.downlink_codec
        if codec is not None and behind is not None and behind <= self.rules.versions_kept:
            num_bytes = min(num_bytes, behind * get_codec(codec).size_bytes(self.elements))
        return framed_bytes(num_bytes) if num_bytes else 0

    @property
    def elements(self) -> int:
        """Of one fragment."""
        return math.ceil(self.links.params / self.rules.num_fragments)


def policy_of(method: str, options: dict[str, Any]) -> Policy:
    """A method's policy with some fields changed.

    Raises:
        UserError: an unknown field, or a value that is refused.
    """
    try:
        return METHODS[method](**options).policy
    except ValueError as error:
        raise UserError(f"policy: {error}") from None
