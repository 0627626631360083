"""The numbers and choices of a method that machines need: no tensors, no functions, one JSON object."""

import hashlib
from math import inf
from typing import Literal

import msgspec

from farflung.core import schedule
from farflung.units import Adoption, Anchor, FinalMerge, Pace


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about a method that is data. It travels in tapes, recipes and checkpoints.

    One base knob sets the times: `lease_s`. Heartbeats go out every fifth of it; a donor, a hand-in and a
    save are waited for during one lease; the other waits follow from measured step and transfer times.
    """

    method: str
    topology: Literal["hub", "gossip"] = "hub"
    pace: Pace = "free"
    num_fragments: int = 24  # P
    sync_every_steps: int = 24  # H
    overlap_steps: int = 2  # tau
    fragment_plan: str = "balanced"
    quorum: int | Literal["all"] = 1  # K
    grace_gamma: float = 0.8  # share of the slack that the grace window may use; 0 = no grace
    max_lead_steps: int | None = None
    throttle: bool = True
    weighting: str = "tokens"
    merge: str = "rda"
    merge_embedding: str = "avg"
    anchor: Anchor = "present"
    adoption: Adoption = "overwrite"
    mix_alpha: float = 0.0  # share of the learner's own value that adoption "mix" keeps
    codec: str = "fp32"
    outer: str = "nesterov"
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    final: FinalMerge = "average"
    lease_s: float = 10.0

    def __post_init__(self) -> None:
        schedule.check(self.sync_every_steps, self.num_fragments, self.overlap_steps)
        _require(self.quorum == "all" or self.quorum >= 1, "quorum", self.quorum, "at least 1, or 'all'")
        _require(0 <= self.grace_gamma < 1, "grace_gamma", self.grace_gamma, "in [0, 1)")
        _require(0 <= self.mix_alpha < 1, "mix_alpha", self.mix_alpha, "in [0, 1)")
        _require(0 < self.lease_s < inf, "lease_s", self.lease_s, "above 0, in seconds")
        lead = self.max_lead_steps
        _require(lead is None or lead >= 1, "max_lead_steps", lead, "at least 1, or absent")
        if self.mix_alpha and self.adoption != "mix":
            raise ValueError(f"mix_alpha = {self.mix_alpha} has no effect with adoption = {self.adoption!r}")
        if self.pace == "lockstep" and lead is not None:
            raise ValueError("max_lead_steps has no effect with pace = 'lockstep'")

    @property
    def carries_tokens(self) -> bool:
        """Whether work that was not merged survives an adoption (mix with alpha > 0, rebase)."""
        return self.adoption == "rebase" or (self.adoption == "mix" and self.mix_alpha > 0)

    def digest(self) -> str:
        """Eight hex digits that all members of a run must agree on."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:8]

    @property
    def heartbeat_s(self) -> float:
        return self.lease_s / 5

    @property
    def versions_kept(self) -> int:
        """Versions of a fragment that the syncer keeps as possible bases."""
        return self.overlap_steps + 2


def _require(ok: bool, field: str, value: object, wanted: str) -> None:
    if not ok:
        raise ValueError(f"{field} = {value!r}: must be {wanted}")
