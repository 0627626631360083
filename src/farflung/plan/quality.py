"""What the studies in docs/results measured of a choice's loss. What none of them measured is said to be unknown.

All of it is from one small model and a few hundred steps: read the study before relying on it. Differences below
about 1 % lie within those between seeds. Measured one at a time; the sum of several is nobody's measurement.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from farflung.plan.candidate import Candidate

UNKNOWN = "not measured"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A difference of final loss.

    Attributes:
        what: the choice.
        percent: mean relative difference.
        against: what it is compared with.
        study: its name; docs/results/STUDY.md has set-up, spread and limits.
        figure: as it stands there.
    """

    what: str
    percent: float
    against: str
    study: str
    figure: str


def _of(study: str, against: str, rows: dict[str, tuple[float, str]]) -> dict[str, Measured]:
    return {
        what: Measured(what=what, percent=percent, against=against, study=study, figure=figure)
        for what, (percent, figure) in rows.items()
    }


CODEC = _of("compression", "fp32", {
    "bf16": (-0.36, "-0.36 % (-2.38 to +0.94)"),
    "int8": (0.08, "+0.08 % (-1.97 to +0.97)"),
    "int4": (-0.05, "-0.05 % (-1.69 to +0.93)"),
    "2bit": (1.02, "+1.02 % (-2.28 to +4.97)"),
    "1bit": (0.32, "+0.32 % (-2.27 to +1.56)"),
})  # fmt: skip
"""Of contributions, without error feedback; four learners in lockstep, H = 24."""

DOWNLINK = _of("bytes_language", "fp32 both ways", {
    "1bit up, int4 down": (1.2, "+1.2 %"),
    "2bit up, int4 down": (1.2, "+1.2 % (-0.8 to +4.1)"),
    "int4 up, int4 down": (10.5, "+10.5 %"),
})  # fmt: skip
"""Of increments, with error feedback at the hub alone; AdamW inside, four learners in lockstep, H = 32."""

DILOCO = {10: 2.081, 30: 2.128, 100: 2.124}
GASLOC = {10: 2.128, 30: 2.140, 100: 2.132}
"""Loss by H, four learners, each method at its best momentum (gossip_local_steps)."""
BASE_STEPS = 10

OVERWRITE = _of("overlap", "tau = 0", {
    "tau = 1, overwrite": (-0.5, "-0.5 % (-2.7 to +0.9)"), "tau = 2, overwrite": (-0.3, "-0.3 % (-2.4 to +1.5)"),
    "tau = 5, overwrite": (0.2, "+0.2 % (-2.0 to +2.1)"), "tau = 10, overwrite": (0.6, "+0.6 % (-0.7 to +1.8)"),
})  # fmt: skip
MIX = _of("overlap", "tau = 0", {
    "tau = 1, mix": (-0.3, "-0.3 % (-1.4 to +1.0)"), "tau = 2, mix": (-0.1, "-0.1 % (-0.5 to +0.8)"),
    "tau = 5, mix": (-0.4, "-0.4 % (-1.1 to +0.0)"), "tau = 10, mix": (0.2, "+0.2 % (-0.0 to +0.4)"),
})  # fmt: skip
"""By tau, at H = 24; two learners in lockstep."""

QUORUM = _of("heterogeneous", "K = M", {
    "K = 1 with grace": (0.4, "+0.4 % (-0.3 to +1.2)"), "K = 1 without grace": (1.9, "+1.9 % (+1.8 to +2.1)"),
})  # fmt: skip
"""K = 1 of 8 learners, one of them 18 % slower."""


@dataclass(frozen=True)
class Quality:
    """What is known of a candidate's loss.

    Attributes:
        parts: measured, each by itself.
        unknown: choices that no study measured.
    """

    parts: tuple[Measured, ...]
    unknown: tuple[str, ...]

    @property
    def percent(self) -> float:
        """Of what was measured, added up: an assumption."""
        return sum(part.percent for part in self.parts)

    @property
    def text(self) -> str:
        """For a table: the sum, and a question mark where something is not known."""
        if not self.parts and self.unknown:
            return "?"
        return f"{self.percent:+.1f} %" + (" + ?" if self.unknown else "")


def quality(candidate: Candidate) -> Quality:
    """Look a candidate's choices up.

    >>> from farflung.methods import diloco
    >>> found = quality(Candidate(learners=4, policy=diloco(sync_every_steps=100, codec="int4").policy))
    >>> found.text, [part.study for part in found.parts]
    ('+2.0 %', ['gossip_local_steps', 'compression'])
    """
    parts: list[Measured] = []
    unknown: list[str] = []
    for look_up in (_steps, _codec, _overlap, _quorum):
        found = look_up(candidate)
        if isinstance(found, str):
            unknown.append(found)
        else:
            parts += found
    return Quality(tuple(parts), tuple(unknown))


def _steps(candidate: Candidate) -> str | Sequence[Measured]:
    """H, as diloco or gasloc had it at the next larger H that was measured."""
    H, method = candidate.policy.sync_every_steps, candidate.method
    if method == "sparseloco":
        return f"{method}: {UNKNOWN}"
    table = GASLOC if method == "gasloc" else DILOCO
    at = next((steps for steps in table if steps >= H), None)
    if at is None:
        return f"H = {H}: {UNKNOWN} beyond {max(table)}"
    percent = 100 * (table[at] / DILOCO[BASE_STEPS] - 1)
    measured = "gasloc V2" if method == "gasloc" else "diloco"
    if not percent:
        return ()
    what = f"H = {at}" if method in ("diloco", "gasloc") else f"H = {at}, of {measured}"
    return [
        Measured(
            what=what, percent=round(percent, 2), against=f"diloco, H = {BASE_STEPS}", study="gossip_local_steps",
            figure=f"{table[at]:.3f} against {DILOCO[BASE_STEPS]:.3f}",
        )
    ]  # fmt: skip


def _codec(candidate: Candidate) -> str | Sequence[Measured]:
    codec, downlink = candidate.policy.codec, candidate.policy.downlink_codec
    if downlink is not None:
        both = f"{codec} up, {downlink} down"
        return [DOWNLINK[both]] if both in DOWNLINK else f"{both}: {UNKNOWN}"
    if codec == "fp32" or candidate.method == "sparseloco":
        return ()
    return [CODEC[codec]] if codec in CODEC else f"{codec}: {UNKNOWN}"


def _overlap(candidate: Candidate) -> str | Sequence[Measured]:
    policy = candidate.policy
    if not policy.overlap_steps:
        return ()
    what = f"tau = {policy.overlap_steps}, {policy.adoption}"
    found = {**OVERWRITE, **MIX}.get(what)
    return [found] if found is not None else f"{what}: {UNKNOWN}"


def _quorum(candidate: Candidate) -> str | Sequence[Measured]:
    policy = candidate.policy
    if policy.topology == "gossip" or candidate.quorum == candidate.learners:
        return ()
    if candidate.quorum != 1:
        return f"K = {candidate.quorum} of {candidate.learners}: {UNKNOWN}"
    return [QUORUM["K = 1 with grace" if policy.grace_gamma else "K = 1 without grace"]]
