"""From candidates to a verdict: closed forms for all, the simulator for the best of them, what limits each.

Order: what fits before what does not; then what studies measured and found good enough, then what none measured,
then what costs too much loss; within these by time, and by bytes where times differ by less than is known.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from farflung.plan.candidate import Candidate
from farflung.plan.exchange import Exchange, data_parallel, exchange
from farflung.plan.quality import Quality, quality
from farflung.plan.setting import Setting
from farflung.simulate.outcome import Estimate, finite
from farflung.simulate.scenario import Scenario
from farflung.simulate.simulating import WAITING, Effort, simulate

EFFORT = Effort(half_width=0.01, max_seeds=12, round_steps=300)
ENOUGH = 0.97  # of the time in steps: nothing but compute limits what is above
NARROW = 0.5  # of the learners in a merge: below, a link or failures keep work out of the model
MAX_LOSS = 3.0  # percent; the measured cost of H = 100 is 2.1
SIMULATED = 12
SAME_TIME = 0.03  # relative difference of two times that is not worth more loss or bytes


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A candidate and what is to be expected of it.

    Attributes:
        candidate: it.
        exchange, quality: see their modules.
        goodput: share of the time in steps; a half-width of inf: from closed forms alone.
        breadth, merged_share, uptime: contributions of a merge, merged tokens / trained, share of the time in
            which at least K learners ran; None: not simulated.
        time_s: until the budget is trained; its half-width follows from that of goodput.
        bytes_up, bytes_down: of all learners, of the whole run.
        limit: what bounds it: compute, uplink, downlink, hub link, failures, slowest island or quality.
        why: one line.
        fits: an exchange fits, and its work gets into the model.
        simulated: or from closed forms.
    """

    candidate: Candidate
    exchange: Exchange
    quality: Quality
    goodput: Estimate
    breadth: float | None
    merged_share: float | None
    uptime: float | None
    time_s: Estimate
    bytes_up: float
    bytes_down: float
    limit: str
    why: str
    fits: bool
    simulated: bool

    @property
    def hides(self) -> bool:
        """Whether the exchange costs no time: it is over within tau steps."""
        return self.exchange.fits and self.exchange.takes_s <= self.exchange.hidden_s

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        policy = self.candidate.policy
        return {
            "method": self.candidate.method, "learners": self.candidate.learners,
            "quorum": None if policy.topology == "gossip" else self.candidate.quorum,
            "sync_every_steps": policy.sync_every_steps, "num_fragments": policy.num_fragments,
            "overlap_steps": policy.overlap_steps, "codec": policy.codec, "downlink_codec": policy.downlink_codec,
            "given": self.candidate.given,
            "time_s": self.time_s.mean, "time_s_ci": finite(self.time_s.interval), "goodput": self.goodput.mean,
            "goodput_ci": finite(self.goodput.interval), "merge_breadth": self.breadth,
            "merged_share": self.merged_share, "uptime": self.uptime,
            "bytes_up": self.bytes_up, "bytes_down": self.bytes_down,
            "exchange_s": self.exchange.takes_s, "fits": self.fits, "limit": self.limit, "why": self.why,
            "loss_percent": self.quality.percent if self.quality.parts else None,
            "loss_measured": [vars(part) for part in self.quality.parts],
            "loss_not_measured": list(self.quality.unknown), "simulated": self.simulated,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is wanted.

    Attributes:
        max_loss: percent of loss that may be paid, as far as studies measured it.
        simulated: so many of the best candidates go through the simulator; all others stay with closed forms.
        effort: how hard the simulator tries.
    """

    max_loss: float = MAX_LOSS
    simulated: int = SIMULATED
    effort: Effort = EFFORT


def judge(
    setting: Setting,
    candidates: Iterable[Candidate],
    wish: Wish | None = None,
    show: Callable[[Candidate], None] = lambda candidate: None,
) -> list[Judged]:
    """All candidates, best first; the best of each method and the best of all are simulated."""
    wish, lives = wish or Wish(), Lives(setting, (wish or Wish()).effort)
    listed = _thinned([_closed(setting, candidate, lives, wish) for candidate in candidates])
    first = sorted(listed, key=lambda one: _order(one, wish))
    chosen = _chosen(first, wish.simulated)
    judged = []
    for one in first:
        if id(one) in chosen:
            show(one.candidate)
            one = _simulated(setting, one, wish)
        judged.append(one)
    return sorted(judged, key=lambda one: (not one.simulated and wish.simulated != 0, *_order(one, wish)))


def _chosen(ordered: Sequence[Judged], num: int) -> set[int]:
    """The best of all, but the best of each method and what was given in any case."""
    if not num:
        return set()
    methods: dict[str, Judged] = {}
    for one in ordered:
        methods.setdefault(one.candidate.method, one)
    must = [*methods.values(), *(one for one in ordered if one.candidate.given)]
    rest = [one for one in ordered if all(one is not m for m in must)]
    return {id(one) for one in [*must, *rest[: max(0, num - len(must))]]}


def _order(one: Judged, wish: Wish) -> tuple[Any, ...]:
    paid = one.quality.percent
    time = round(math.log(one.time_s.mean) / SAME_TIME)
    return not one.fits, paid > wish.max_loss, bool(one.quality.unknown), time, round(paid), one.bytes_up


def _thinned(judged: Sequence[Judged]) -> list[Judged]:
    """Of candidates that differ in tau alone, that with the smallest tau that hides its exchange, or the largest.

    More overlap than is needed only makes work older.
    """
    kept: dict[bytes, Judged] = {}
    for one in sorted(judged, key=lambda one: one.candidate.policy.overlap_steps):
        policy = msgspec.structs.replace(one.candidate.policy, overlap_steps=0)
        key = msgspec.json.encode([one.candidate.learners, policy, one.candidate.given])
        before = kept.get(key)
        if before is None or not before.hides:
            kept[key] = one
    return [*kept.values()]


# ---- islands alone -------------------------------------------------------------------------------------


class Lives:
    """Goodput of learners that wait for nobody, and of one job over all chips: once for each M."""

    def __init__(self, setting: Setting, effort: Effort) -> None:
        self._setting, self._effort = setting, replace(effort, round_steps=0)
        self._known: dict[int, Estimate] = {}

    def goodput(self, learners: int) -> Estimate:
        if learners not in self._known:
            scenario = (
                Scenario(method="decoupled", learners=learners, cluster=self._setting.cluster())
                if learners > 1
                else Scenario(method="data_parallel", learners=1, cluster=self._setting.cluster())
            )
            self._known[learners] = simulate(scenario, self._effort).goodput
        return self._known[learners]


# ---- two ways to a figure ------------------------------------------------------------------------------


def _closed(setting: Setting, candidate: Candidate, lives: Lives, wish: Wish) -> Judged:
    """Islands' lives times the exchange's share. Who waits for all others stands when any of them does."""
    found, policy = exchange(setting, candidate), candidate.policy
    alone = lives.goodput(candidate.learners)
    waits = policy.topology == "hub" and policy.pace == "lockstep"
    life = lives.goodput(1) if waits else alone
    goodput = Estimate(life.mean * found.share, float("inf"))
    return _judged(
        setting, candidate, found, goodput, wish,
        lost={"failures": 1 - life.mean, WAITING: life.mean * (1 - found.share)},
    )  # fmt: skip


def _simulated(setting: Setting, one: Judged, wish: Wish) -> Judged:
    """The same candidate in the simulator."""
    candidate, M = one.candidate, one.candidate.learners
    gossip = candidate.policy.topology == "gossip"
    outcome = simulate(
        Scenario(
            method=candidate.simulated_as.method, learners=M, cluster=setting.cluster(),
            policy=candidate.simulated_as, step_s=setting.step_s, slowest=setting.slowest, jitter=setting.jitter,
            links=setting.partner_links(M) if gossip else setting.links(M),
            tokens_per_step=setting.tokens_per_step / setting.parts(M),
        ),
        wish.effort,
    )  # fmt: skip
    waited = outcome.lost.get(WAITING, 0.0)
    lost = {"failures": sum(outcome.lost.values()) - waited, WAITING: waited}
    judged = _judged(
        setting, candidate, one.exchange, outcome.goodput, wish, lost, simulated=True,
        breadth=outcome.merge_breadth.mean, merged_share=outcome.merged_share.mean,
        uptime=outcome.uptime.mean,
    )  # fmt: skip
    total_s = judged.time_s.mean * M
    return replace(
        judged, bytes_up=outcome.bytes_up_per_s * total_s, bytes_down=outcome.bytes_down_per_s * total_s
    )


def _judged(
    setting: Setting, candidate: Candidate, found: Exchange, goodput: Estimate, wish: Wish, lost: dict[str, float],
    simulated: bool = False, breadth: float | None = None, merged_share: float | None = None,
    uptime: float | None = None,
) -> Judged:  # fmt: skip
    M = candidate.learners
    speed = (1 - 1 / M + 1 / (1 + setting.slowest) / M) / setting.step_s  # steps a second, mean over learners
    most = setting.islands * setting.tokens_per_step * speed  # tokens a second if all stepped all the time
    time_s = setting.budget_tokens / (most * goodput.mean)
    spread = time_s * goodput.half_width / goodput.mean
    steps = setting.budget_tokens / (setting.tokens_per_step / setting.parts(M))  # of all learners
    exchanges = steps / candidate.policy.sync_every_steps * found.rounds
    known = quality(candidate)
    fits = found.fits and not (breadth is not None and _narrow(candidate, breadth, lost))
    limit, why = _limit(setting, candidate, found, known, wish, goodput.mean, lost, breadth)
    return Judged(
        candidate=candidate, exchange=found, quality=known, goodput=goodput, breadth=breadth,
        merged_share=merged_share, uptime=uptime, time_s=Estimate(time_s, spread), limit=limit, why=why, fits=fits,
        bytes_up=exchanges * found.up_bytes, bytes_down=exchanges * found.down_bytes,
        simulated=simulated,
    )  # fmt: skip


# ---- what limits it ------------------------------------------------------------------------------------


def _narrow(candidate: Candidate, breadth: float, lost: dict[str, float]) -> bool:
    """Whether merges lack learners that are there: their work comes late."""
    if candidate.policy.topology == "gossip":
        return breadth - 1 < NARROW * (1 - lost["failures"])  # itself, and a partner
    there = candidate.learners * (1 - lost["failures"])
    return breadth < NARROW * there


def _limit(
    setting: Setting, candidate: Candidate, found: Exchange, known: Quality, wish: Wish, goodput: float,
    lost: dict[str, float], breadth: float | None,
) -> tuple[str, str]:  # fmt: skip
    """The first thing that would have to change, and one line about it."""
    if not found.fits:
        return found.binds, f"does not fit: {found.problem}"
    if breadth is not None and _narrow(candidate, breadth, lost):
        return (
            found.binds,
            f"only {breadth:.1f} of {candidate.learners} learners in a merge: the rest comes late",
        )
    if known.percent > wish.max_loss:
        return "quality", f"costs {known.percent:+.1f} % loss as far as measured"
    if goodput >= ENOUGH:
        return "compute", f"{goodput:.0%} in steps"
    if lost["failures"] >= lost[WAITING]:
        return "failures", f"learners stand {lost['failures']:.0%} of the time"
    return _waiting(setting, found, lost[WAITING])


def _waiting(setting: Setting, found: Exchange, waited: float) -> tuple[str, str]:
    """Waits are for a link, for somebody slow, or for somebody who failed: the largest by closed forms."""
    slow = setting.slowest / (1 + setting.slowest)
    link = max(0.0, found.takes_s - found.hidden_s) * found.rounds / found.cycle_s
    link = min(1.0, link)
    failed = waited - link - slow
    line = f"learners wait {waited:.0%} of the time"
    if failed > max(link, slow):
        return "failures", f"{line}, most of it for others that stand"
    if slow > link:
        return "slowest island", f"{line}, most of it for the slowest"
    return found.binds, f"{line}; an exchange takes {found.takes_s:.3g} s"


def reference(setting: Setting, effort: Effort = EFFORT) -> dict[str, float]:
    """Data-parallel training over all islands, elastic or not as they are: time, goodput, bytes of all islands."""
    found = data_parallel(setting)
    life = simulate(Scenario(method="data_parallel", learners=1, cluster=setting.cluster()), effort).goodput
    goodput = life.mean * found.share
    speed = (1 - 1 / setting.islands + 1 / (1 + setting.slowest) / setting.islands) / setting.step_s
    time_s = setting.budget_tokens / (setting.islands * setting.tokens_per_step * speed * goodput)
    steps = setting.budget_tokens / (setting.islands * setting.tokens_per_step)
    return {"time_s": time_s, "goodput": goodput, "bytes_up": steps * found.bytes_each * setting.islands}
