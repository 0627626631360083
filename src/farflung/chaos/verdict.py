"""The promises that a tape can show, findings where one was broken, and the verdict over a tape."""

from dataclasses import dataclass, field
from typing import Any

INVARIANTS = (
    "versions only grow",
    "no contribution is merged twice",
    "every token has a fate",
    "no merge below quorum",
    "never two rounds of one fragment",
    "no answer before its merge",
    "a wait has a deadline and a reason",
    "a donor has lineage",
    "a rejoin is proven",
    "progress while enough learners live",
)
VERSIONS, TWICE, FATES, QUORUM, ROUNDS, ANSWERS, WAITS, DONORS, REJOINS, PROGRESS = INVARIANTS


@dataclass(frozen=True)
class Finding:
    """One broken promise."""

    invariant: str
    t: float
    node: str
    detail: str

    def __str__(self) -> str:
        return f"{self.t:.3f} s {self.node}: {self.invariant}: {self.detail}"


@dataclass
class Verdict:
    """What the oracle found in a tape.

    Attributes:
        findings: broken promises, by time.
        records, merges, rejoins: what there was to judge.
        ended: how the run ended, as the tape says; None for a tape that breaks off.
    """

    findings: list[Finding] = field(default_factory=list)
    records: int = 0
    merges: int = 0
    rejoins: int = 0
    ended: str | None = None

    @property
    def ok(self) -> bool:
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        findings = [vars(f) for f in self.findings]
        return {**vars(self), "findings": findings, "ok": self.ok}

    def __str__(self) -> str:
        seen = f"{self.records} records, {self.merges} merges, {self.rejoins} rejoins, "
        seen += self.ended or "cut off"
        if self.ok:
            return f"{seen}: all {len(INVARIANTS)} promises kept"
        return "\n".join([f"{seen}: BROKEN", *map(str, self.findings)])
