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
    clip: Literal["median"] | None = None  # cut each contribution to the median norm of its merge
    anchor: Anchor = "present"
    adoption: Adoption = "overwrite"
    mix_alpha: float = 0.0  # share of the learner's own value that adoption "mix" keeps
    codec: str = "fp32"  # of contributions
    downlink_codec: str | None = None  # of a version's increments; None: whole values go down, in fp32
    outer: str = "nesterov"
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    final: FinalMerge = "average"
    lease_s: float = 10.0

    # topology "gossip" only
    matching: str = "random"  # who meets whom in a round: a name in farflung.core.mixing
    mixing: float = 1.0  # alpha, the gossip step; 1 on a pair is exact averaging
    momentum_on: Literal["local", "mixed"] = "local"  # GASLoC V1, V2
    local_steps: dict[str, int] = {}  # learner: its own H, where it differs from sync_every_steps
    exchange_s: float | None = None  # how long a partner is waited for; None follows from measured times
    gathers: int = 10  # times in a run that the consensus average is measured, beside the last

    # methods that keep a buffer of what they have not sent; None with all others
    buffer_decay: float | None = None  # beta: share of the buffer that stays for the next round
    reduce: Literal["world", "contributors"] | None = None  # mean over all, or over who sent a coefficient
    dense_every_rounds: int | None = None  # so often learners that drift are averaged; None: never

    def __post_init__(self) -> None:
        gossip = self.topology == "gossip"  # may overlap a whole round
        schedule.check(self.sync_every_steps, self.num_fragments, 0 if gossip else self.overlap_steps)
        _require(self.quorum == "all" or self.quorum >= 1, "quorum", self.quorum, "at least 1, or 'all'")
        _require(0 <= self.grace_gamma < 1, "grace_gamma", self.grace_gamma, "in [0, 1)")
        _require(0 <= self.mix_alpha < 1, "mix_alpha", self.mix_alpha, "in [0, 1)")
        _require(0 < self.lease_s < inf, "lease_s", self.lease_s, "above 0, in seconds")
        lead = self.max_lead_steps
        _require(lead is None or lead >= 1, "max_lead_steps", lead, "at least 1, or absent")
        beta = self.buffer_decay
        _require(beta is None or 0 <= beta <= 1, "buffer_decay", beta, "from 0 to 1, or absent")
        dense = self.dense_every_rounds
        _require(dense is None or dense >= 1, "dense_every_rounds", dense, "at least 1, or absent")
        if self.mix_alpha and self.adoption != "mix":
            raise ValueError(f"mix_alpha = {self.mix_alpha} has no effect with adoption = {self.adoption!r}")
        if self.pace == "lockstep" and lead is not None:
            raise ValueError("max_lead_steps has no effect with pace = 'lockstep'")
        if gossip:
            self._check_gossip()
        for field in () if gossip else GOSSIP_FIELDS:
            if getattr(self, field) != _DEFAULTS[field]:
                raise ValueError(f"{field} has no effect with topology = 'hub'")

    def _check_gossip(self) -> None:
        _require(self.num_fragments == 1, "num_fragments", self.num_fragments, "1 with topology = 'gossip'")
        H, tau = self.sync_every_steps, self.overlap_steps
        _require(0 <= tau <= H, "overlap_steps", tau, f"in 0..{H}, the steps of a round")
        _require(0 <= self.mixing < inf, "mixing", self.mixing, "at least 0")
        _require(self.gathers >= 0, "gathers", self.gathers, "at least 0")
        for field in ("downlink_codec", "clip"):
            if getattr(self, field) is not None:
                raise ValueError(f"{field} has no effect with topology = 'gossip'")
        wait_s = self.exchange_s
        _require(wait_s is None or 0 < wait_s < inf, "exchange_s", wait_s, "above 0, in seconds, or absent")
        for learner, steps in self.local_steps.items():
            least = max(1, self.overlap_steps)
            _require(steps >= least, f"local_steps.{learner}", steps, f"at least {least}")

    @property
    def carries_tokens(self) -> bool:
        """Whether work that was not merged survives an adoption (mix with alpha > 0, rebase)."""
        return self.adoption == "rebase" or (self.adoption == "mix" and self.mix_alpha > 0)

    def digest(self) -> str:
        """Eight hex digits that all members of a run must agree on."""
        fields = msgspec.to_builtins(self)
        for field in () if self.topology == "gossip" else GOSSIP_FIELDS:
            del fields[field]
        for field in OPTIONAL_FIELDS:
            if fields[field] is None:
                del fields[field]
        return hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()[:8]

    def steps_of(self, learner: str) -> int:
        """Inner steps of a learner's round, H_i."""
        return self.local_steps.get(learner, self.sync_every_steps)

    def is_dense(self, round: int) -> bool:
        """Whether a round averages whole parameters: every ``dense_every_rounds``-th one, counted from 0."""
        every = self.dense_every_rounds
        return every is not None and (round + 1) % every == 0

    @property
    def heartbeat_s(self) -> float:
        return self.lease_s / 5

    @property
    def versions_kept(self) -> int:
        """Versions of a fragment that the syncer keeps as possible bases."""
        return self.overlap_steps + 2


GOSSIP_FIELDS = ("matching", "mixing", "momentum_on", "local_steps", "exchange_s", "gathers")
BUFFER_FIELDS = ("buffer_decay", "reduce", "dense_every_rounds")
OPTIONAL_FIELDS = (*BUFFER_FIELDS, "downlink_codec", "clip")
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Policy)} | {"local_steps": {}}


def _require(ok: bool, field: str, value: object, wanted: str) -> None:
    if not ok:
        raise ValueError(f"{field} = {value!r}: must be {wanted}")
