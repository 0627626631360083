"""What a seed means for a walk over the machines: a policy, learners, a script of choices."""

import random
from dataclasses import dataclass

import msgspec

from farflung.protocol.policy import Policy
from farflung.units import Adoption

CHOICES = 280  # of a script: some 200 machine events, since the end of a step is heard of later

Choice = tuple[float, float, float]  # what kind, which one, how


def random_policy(draw: random.Random, num_learners: int) -> Policy:
    """Any method of the hub family that a machine can tell from another, with a quorum that can be met."""
    P, H = draw.choice([(1, 2), (1, 4), (2, 3), (2, 4), (3, 3), (3, 4), (4, 4), (2, 6)])
    adoptions: list[Adoption] = ["overwrite", "overwrite", "rebase", "mix"]
    adoption = draw.choice(adoptions)
    lockstep = draw.random() < 0.3
    return Policy(
        method="walk",
        pace="lockstep" if lockstep else "free",
        num_fragments=P,
        sync_every_steps=H,
        overlap_steps=draw.choice([*range(min(H, 4)), H - 1]),
        quorum=draw.choice(["all", *range(1, num_learners + 1)]),
        grace_gamma=draw.choice([0.0, 0.8]),
        max_lead_steps=draw.choice([None, None, H, 2 * H]) if not lockstep else None,
        throttle=draw.random() < 0.6,
        anchor=draw.choice(["present", "base"]),
        adoption=adoption,
        mix_alpha=draw.choice([0.0, 0.5]) if adoption == "mix" else 0.0,
        final=draw.choice(["average", "outer", "none"]),
        lease_s=draw.choice([0.5, 1.0, 3.0]),
    )


@dataclass(frozen=True)
class Plan:
    """A seed, unfolded."""

    policy: Policy
    step_s: list[float]
    budget_tokens: int
    fair_birth: bool  # the faults begin after it
    ends: bool  # asked to finish once the faults have stopped
    slow_fragment: int | None
    risk: float  # that a choice is a fault
    script: list[Choice]


def unfold(seed: int, choices: int = CHOICES) -> Plan:
    draw = random.Random(seed)
    num_learners = draw.choice([2, 2, 3, 3, 4])
    policy = random_policy(draw, num_learners)
    if seed % 3 == 0:
        policy = msgspec.structs.replace(policy, downlink_codec="bf16")
    if seed % 5 == 0:
        policy = msgspec.structs.replace(policy, clip="median")
    step_s = [draw.uniform(0.02, 0.2) for _ in range(num_learners)]
    budget_tokens = 600 if draw.random() < 0.1 else 10**9
    fair_birth, ends, chance = draw.random() < 0.8, draw.random() < 0.25, draw.random
    slow_fragment = draw.randrange(policy.num_fragments) if draw.random() < 0.3 else None
    risk = draw.choice([0.01, 0.03, 0.06])
    script = [(chance(), chance(), chance()) for _ in range(choices)]
    return Plan(policy, step_s, budget_tokens, fair_birth, ends, slow_fragment, risk, script)
