"""Small worlds with a fault plan."""

from dataclasses import dataclass
from typing import Any

import msgspec

from farflung.chaos.oracle import judge
from farflung.chaos.plan import Fault
from farflung.chaos.verdict import Verdict
from farflung.lab.faults import LabFaults
from farflung.methods import Method
from farflung.testing import World

RESTART_S = 0.5


@dataclass
class Ordeal:
    """A world that went through a plan, what was done to it, and the verdict."""

    world: World
    happened: list[dict[str, Any]]
    verdict: Verdict

    @property
    def story(self) -> str:
        return f"{self.verdict}{self.world.story()}"

    def notes(self, kind: str) -> list[dict[str, Any]]:
        return self.world.tape.notes(kind)

    def times(self, kind: str, node: str = "") -> list[float]:
        """When events, actions or messages of a type are on the tape."""
        return [r.t for r in self.world.tape.records if r.type == kind and r.node.startswith(node)]


def undergo(method: Method, *plan: Fault, budget_tokens: int = 2500) -> Ordeal:
    """Three learners, of different speed."""
    world = World(method, [0.1, 0.13, 0.2], budget_tokens)
    happened: list[dict[str, Any]] = []
    faults = LabFaults(
        world, list(plan), RESTART_S,
        record=lambda **details: happened.append({"kind": "fault", "t": world.now, **details}),
    )  # fmt: skip
    while world.finished is None and world.time.step(600.0):
        faults.review(world.syncer.ledger.tokens_trained / budget_tokens)
    policy = msgspec.to_builtins(method.policy)
    return Ordeal(world, happened, judge(world.tape.records, happened, policy=policy))
