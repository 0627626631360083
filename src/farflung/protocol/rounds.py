"""Rounds of the syncer: open, invite, collect, close (Decoupled DiLoCo, Algorithm 2, as semantics.md reads it).

A round gathers contributions to one fragment. It closes on contributions fully received and checked: K of
them, then the grace window. Rounds decide nothing about members or tokens; they say what should happen next.
"""

from dataclasses import dataclass, field
from statistics import median

from farflung.core import quorum, schedule
from farflung.core.clip import to_median
from farflung.core.quorum import Decision, Ema
from farflung.core.weighting import WEIGHTINGS, normalise
from farflung.protocol.actions import Part
from farflung.protocol.membership import Member
from farflung.protocol.policy import Policy

MIN_DEADLINE_S = 0.1  # of an invitation, beyond the step that must end before it can be answered
PATIENCE_S = 1.0  # silence that still counts as progress, when steps are short


@dataclass(frozen=True)
class Arrived:
    """A contribution that lies at the syncer, checked."""

    object: str
    learner: str
    incarnation: int
    base_version: int
    steps: int
    tokens: int
    sync_s: float  # from snapshot to acknowledgement
    norm: float = 0.0  # Euclidean, of the decoded payload


@dataclass
class Round:
    fragment: int
    number: int
    opened_s: float
    members: frozenset[str]  # live when it opened
    final: bool = False
    invited: dict[str, float] = field(default_factory=dict)  # learner: until when it may answer
    missed: set[str] = field(default_factory=set)  # learners whose invitation lapsed
    arrived: dict[str, Arrived] = field(default_factory=dict)
    quorum_s: float | None = None
    grace_s: float = 0.0
    merging: bool = False
    noted_s: float = field(init=False)  # when its wait was last shown

    def __post_init__(self) -> None:
        self.noted_s = self.opened_s

    def parts(self, weighting: str, clip: bool = False) -> list[Part]:
        """Contributions in sorted learner order with normalised weights; those of weight 0 are left out.

        Args:
            weighting: a name in `farflung.core.weighting`.
            clip: cut each to the median norm.
        """
        weigh = WEIGHTINGS[weighting]
        ordered = [self.arrived[name] for name in sorted(self.arrived)]
        weights = [weigh(a.tokens, a.steps) for a in ordered]
        kept = [(a, w) for a, w in zip(ordered, weights, strict=True) if w > 0]
        shares = normalise([w for _, w in kept]) if kept else []
        factors = to_median([a.norm for a, _ in kept]) if clip else []
        scales = [factor if factor < 1 else None for factor in factors] or [None] * len(kept)
        return [
            Part(object=a.object, learner=a.learner, base_version=a.base_version, weight=share, scale=scale)
            for (a, _), share, scale in zip(kept, shares, scales, strict=True)
        ]


class Rounds:
    """The open rounds, their clock and what was measured of them."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.open: dict[int, Round] = {}
        gossip = policy.topology == "gossip"  # its rounds take averages, whatever partners overlap
        tau = 0 if gossip else policy.overlap_steps
        self.most_open = schedule.max_in_flight(policy.sync_every_steps, policy.num_fragments, tau)
        self.next_fragment = 0
        self.next_number = [1] * policy.num_fragments
        self.closed = 0
        self.last_opened_s: float | None = None
        self.xi_quorum, self.xi_sync = Ema(), Ema()

    @property
    def syncer_step(self) -> int:
        """Rounds closed, in inner steps: P rounds are H steps."""
        return self.closed * self.policy.sync_every_steps // self.policy.num_fragments

    # ---- opening -------------------------------------------------------------------------------------

    def next_opening_s(self, xi_step_s: float | None, now: float) -> float | None:
        """When the next round may open (free pace); None while the step time is unknown or too many are open."""
        policy = self.policy
        if xi_step_s is None or not self.may_open():
            return None
        if self.last_opened_s is None or not policy.throttle:
            return now
        return self.last_opened_s + schedule.round_interval_s(
            policy.sync_every_steps, policy.num_fragments, xi_step_s
        )

    def may_open(self) -> bool:
        """Whether there is room for one more round, and the next fragment has none."""
        return len(self.open) < self.most_open and self.next_fragment not in self.open

    def start(self, fragment: int, now: float, members: frozenset[str], final: bool = False) -> Round:
        round = Round(fragment, self.next_number[fragment], now, members, final)
        self.open[fragment] = round
        self.next_number[fragment] += 1
        if not final:
            self.next_fragment = (fragment + 1) % self.policy.num_fragments
            self.last_opened_s = now
        return round

    # ---- inviting and closing ------------------------------------------------------------------------

    @staticmethod
    def wants(round: Round, member: Member, now: float) -> bool:
        """Whether this member is to be asked now."""
        if round.merging or round.final or member.name in round.arrived:
            return False
        until = round.invited.get(member.name)
        return until is None or (now > until and round.quorum_s is None)

    def invite(self, round: Round, member: Member, now: float, xi_step_s: float) -> bool:
        """Whether this member is to be asked now; notes its deadline.

        An invitation can be answered at the next boundary, so one step of the member comes before the time
        allowed for the transfer: twice the usual, between 0.1 s and tau steps.
        """
        if not self.wants(round, member, now):
            return False
        most = max(MIN_DEADLINE_S, self.policy.overlap_steps * xi_step_s)
        usual = most if self.xi_sync.value is None else 2 * self.xi_sync.value
        transfer_s = min(max(usual, MIN_DEADLINE_S), most)
        round.invited[member.name] = now + (member.step_s.value or xi_step_s) + transfer_s
        return True

    def arrive(self, round: Round, contribution: Arrived, now: float, needed: int, xi_step_s: float) -> None:
        round.arrived[contribution.learner] = contribution
        if round.quorum_s is None and len(round.arrived) >= needed:
            round.quorum_s = now
            self.xi_quorum = self.xi_quorum.update(now - round.opened_s)
            round.grace_s = self._grace_s(xi_step_s)

    def _grace_s(self, xi_step_s: float) -> float:
        """Eq. 3, kept inside the throttle."""
        policy = self.policy
        grace_s = quorum.grace_s(
            tau=policy.overlap_steps,
            xi_step_s=xi_step_s,
            xi_quorum_s=self.xi_quorum.value or 0.0,
            xi_sync_s=self.xi_sync.value or 0.0,
            gamma=policy.grace_gamma,
        )
        interval_s = schedule.round_interval_s(policy.sync_every_steps, policy.num_fragments, xi_step_s)
        return min(grace_s, interval_s) if policy.throttle else grace_s

    def review(self, round: Round, now: float, needed: int, may_come: set[str]) -> Decision:
        """Close or wait. `may_come`: progressing members that have not contributed to this round."""
        invited, arrived = round.invited, round.arrived
        round.missed |= {name for name, until in invited.items() if now > until and name not in arrived}
        return quorum.decide(
            now_s=now,
            arrived=len(arrived),
            invited_open=sum(invited.get(name, now) >= now for name in may_come),
            required=needed,
            quorum_reached_s=round.quorum_s,
            grace_s=round.grace_s,
        )

    def finish(self, fragment: int) -> Round:
        self.closed += 1
        return self.open.pop(fragment)


def median_step_s(members: list[Member], now: float) -> float | None:
    """xi_step: the median step time over progressing learners."""
    times = [m.step_s.value for m in members if m.progressing(now, PATIENCE_S) and m.step_s.value is not None]
    return median(times) if times else None
