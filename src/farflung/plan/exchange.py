"""Closed forms: what an exchange moves, how long it takes, whether it fits, and what it costs.

    x       = up + down + merge + 4 latency       from a snapshot to the next version at the learner:
              vector, message, announcement and version pass one after the other
    free    a learner waits for nobody. Links keep up if P max(up, down) <= H steps; work is new enough if
            x <= tau steps. A quorum of less than all also closes without those whose step ends late: x + step
    lockstep  a cycle of H steps takes  max(H step + P max(0, x - tau step), P max(up, down))
    gossip    H step + max(0, x - tau step), with x = vector + latency
    data-parallel  step + ring all-reduce of 2 (n - 1) / n of the gradients, in fp32

step is the slowest learner's where others wait for it. Failures and jitter are not in it: the simulator has them.
`tests/plan/test_exchange.py` compares all of it with the simulator.
"""

from dataclasses import dataclass
from typing import Literal

from farflung.core.codecs import get_codec
from farflung.core.traffic import FP32_BYTES, framed_bytes, ring
from farflung.plan.candidate import Candidate
from farflung.plan.setting import Setting

Where = Literal["uplink", "downlink", "hub link"]
MBIT = 1e6 / 8  # bytes


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Of a candidate in a setting; times in seconds, bytes of one learner with frame headers.

    Attributes:
        up_bytes, down_bytes: of one fragment's exchange.
        up_s, down_s: that it occupies the learner's link, or its part of the hub's.
        takes_s: x, from snapshot to adoption.
        hidden_s: tau steps, in which that costs nothing.
        cycle_s: of H steps, without failures.
        steps_s: of that, in steps of a learner of usual speed.
        rounds: exchanges of a learner in a cycle: P.
        binds: the line that it takes longest to pass.
        problem: why it does not fit, one line; who waits fits if x <= H steps, all others: see the module.
    """

    up_bytes: int
    down_bytes: int
    up_s: float
    down_s: float
    takes_s: float
    hidden_s: float
    cycle_s: float
    steps_s: float
    rounds: int
    binds: Where
    problem: str

    @property
    def fits(self) -> bool:
        return not self.problem

    @property
    def share(self) -> float:
        """Of the time in steps, 0..1, if nothing fails."""
        return self.steps_s / self.cycle_s


def exchange(setting: Setting, candidate: Candidate) -> Exchange:
    """See the module.

    >>> from farflung.methods import diloco
    >>> setting = Setting(params=1e9, islands=4, up_mbps=1000.0, down_mbps=1000.0)
    >>> found = exchange(setting, Candidate(learners=4, policy=diloco(sync_every_steps=100).policy))
    >>> round(found.up_s), round(found.takes_s), round(found.share, 2), found.fits
    (32, 64, 0.61, True)
    """
    policy, M = candidate.policy, candidate.learners
    gossip, H, P, tau = (
        policy.topology == "gossip", policy.sync_every_steps, policy.num_fragments, policy.overlap_steps,
    )  # fmt: skip
    links = setting.partner_links(M) if gossip else setting.links(M)
    elements = -int(-setting.params // P)
    up_bytes = framed_bytes(get_codec(policy.codec).size_bytes(elements))
    down_bytes = up_bytes if gossip else framed_bytes(_version_bytes(policy.downlink_codec, elements))
    up_s, down_s = links.up_s(up_bytes), links.down_s(down_bytes)
    waits = gossip or policy.pace == "lockstep"
    slow_s = setting.step_s * (1 + setting.slowest) if waits else setting.step_s
    takes_s = up_s + links.latency_s if gossip else up_s + down_s + links.merge_s + 4 * links.latency_s
    hidden_s, busy_s, steps_s = tau * setting.step_s, P * max(up_s, down_s), H * setting.step_s
    ends_s = (
        0.0 if waits or candidate.quorum == M else setting.step_s
    )  # a snapshot waits for the end of a step
    cycle_s = steps_s
    if waits:
        cycle_s = H * slow_s + P * max(0.0, takes_s - tau * slow_s)
        cycle_s = max(cycle_s, busy_s)
    mean_step_s = setting.step_s * (1 + setting.slowest / M)
    return Exchange(
        up_bytes=up_bytes, down_bytes=down_bytes, up_s=up_s, down_s=down_s, takes_s=takes_s, hidden_s=hidden_s,
        cycle_s=cycle_s, steps_s=H * mean_step_s if waits else cycle_s, rounds=P,
        binds=_binds(setting, candidate, up_s, down_s),
        problem=_problem(waits, takes_s + ends_s, hidden_s, busy_s, steps_s, _patience_s(candidate)),
    )  # fmt: skip


def _version_bytes(codec: str | None, elements: int) -> int:
    """Of what leads a learner from a fragment's version to the next one."""
    return FP32_BYTES * elements if codec is None else get_codec(codec).size_bytes(elements)


def _patience_s(candidate: Candidate) -> float:
    """How long a gossip partner is waited for at most (`farflung.protocol.peer`); a hub's versions: for ever."""
    policy = candidate.policy
    return (policy.exchange_s or policy.lease_s) if policy.topology == "gossip" else float("inf")


def _problem(
    waits: bool, takes_s: float, hidden_s: float, busy_s: float, steps_s: float, patience_s: float
) -> str:
    if takes_s - hidden_s > patience_s:
        return f"an exchange takes {takes_s:.3g} s, partners wait {patience_s:.3g} s at most (lease_s)"
    if waits and takes_s > steps_s:
        return f"an exchange takes {takes_s:.3g} s, H steps {steps_s:.3g} s"
    if not waits and busy_s > steps_s:
        return f"a cycle's exchanges take {busy_s:.3g} s, H steps {steps_s:.3g} s"
    if not waits and takes_s > hidden_s:
        return f"an exchange takes {takes_s:.3g} s, tau steps {hidden_s:.3g} s"
    return ""


def _binds(setting: Setting, candidate: Candidate, up_s: float, down_s: float) -> Where:
    direction = "up" if up_s >= down_s else "down"
    if candidate.policy.topology == "hub" and setting.hub_binds(candidate.learners, direction):
        return "hub link"
    return "uplink" if direction == "up" else "downlink"


@dataclass(frozen=True)
class Reference:
    """Data-parallel training over all islands: a ring all-reduce in every step, nothing overlapped."""

    bytes_each: float  # that one island sends in a step
    ring_s: float
    share: float  # of the time in steps, if nothing fails


def data_parallel(setting: Setting) -> Reference:
    """The reference that all of this is to beat.

    >>> found = data_parallel(Setting(params=1e9, islands=4, up_mbps=1000.0, down_mbps=1000.0))
    >>> round(found.ring_s), round(found.share, 3)
    (48, 0.02)
    """
    n = setting.islands
    each = ring(FP32_BYTES * setting.params, n).up if n > 1 else 0.0
    mbps = min(setting.up_mbps, setting.down_mbps)
    ring_s = each / (mbps * MBIT) + 2 * (n - 1) * setting.latency_s
    step_s = setting.step_s * (1 + setting.slowest)
    mean_step_s = setting.step_s * (1 + setting.slowest / n)
    return Reference(each, ring_s, mean_step_s / (step_s + ring_s))
