"""A small world for tests: quadratic islands around the real machines, hub and trainers, under virtual time."""

from collections.abc import Callable, Iterable, Sequence

from farflung.chaos.plan import Fault
from farflung.core.fragments import make_plan
from farflung.core.vectors import describe
from farflung.engine.make import make_island, slot_sizes
from farflung.engine.trainer import Trainer
from farflung.lab.body import LocalBody, Slots, StateSlot
from farflung.lab.faults import LabFaults
from farflung.lab.island import VirtualIsland
from farflung.lab.virtual_run import VirtualRun
from farflung.methods import Method
from farflung.testing.gossip_checks import GossipChecks
from farflung.testing.quadratic import QuadraticInner, quadratic_model
from farflung.testing.tapes import MemoryTape

RUN = "pretended"
MERGE_S = 0.001


class QuadraticBody(LocalBody):
    """A trainer whose model is pulled towards a target; `inner` can be looked at."""

    def __init__(self, world: "World", island: VirtualIsland, target: float) -> None:
        up, down = slot_sizes(world.plan, world.method)
        uplink, downlink, state = Slots(up), Slots(down), StateSlot()
        model = quadratic_model(world.seed)
        self.inner = QuadraticInner(model, target)
        method = world.method if world.checks is None else world.checks.method(island)
        tensors, inner = make_island(model, world.plan, method, uplink, downlink, self.inner)
        trainer = Trainer(tensors, inner, put_state=state.put, get_state=state.get, save=lambda: None)
        super().__init__(
            trainer, lambda progress: (world.tokens_per_step, self.inner.step()), uplink, downlink, state
        )


class World(VirtualRun):
    """A syncer and its islands.

    Args:
        method: the method, with its policy.
        step_s: seconds of a step, one number for each island.
        budget_tokens: of the whole run.
        seed: of the first parameters.
        targets: where each island's data pulls the parameters; 0 for all by default.
        latency_s: of a control message, one way.
        transfer_s: of a bulk object: a number, or a function that gives one for each.
        tokens_per_step: of every island.
        faults: what befalls them, as in a recipe.
        restart_s: from a process's death to its start.
        hidden: gossip: islands that nobody can dial, by name.
        walls: gossip: pairs of islands that cannot dial each other.

    >>> from farflung.methods import decoupled
    >>> world = World(decoupled(num_fragments=2, sync_every_steps=4), [0.1, 0.2], 400).run()
    >>> world.finished, world.syncer.ledger.in_flight
    ('finished', 0)
    """

    tape: MemoryTape

    def __init__(
        self,
        method: Method,
        step_s: Sequence[float],
        budget_tokens: int,
        *,
        seed: int = 0,
        targets: Sequence[float] | None = None,
        latency_s: float = 0.01,
        transfer_s: float | Callable[[], float] = 0.02,
        tokens_per_step: int = 10,
        faults: Sequence[Fault] = (),
        restart_s: float = 0.3,
        hidden: Iterable[str] = (),
        walls: Iterable[Iterable[str]] = (),
    ):
        self.seed, self.tokens_per_step = seed, tokens_per_step
        names = [f"learner-{i}" for i in range(len(step_s))]
        own_step_s = dict(zip(names, step_s, strict=True))
        target = dict(zip(names, targets or [0.0] * len(step_s), strict=True))
        policy = method.policy
        specs = describe(quadratic_model(seed))
        super().__init__(
            method,
            make_plan(specs, policy.num_fragments, policy.fragment_plan),
            run=RUN,
            learners=names,
            budget_tokens=budget_tokens,
            tape=MemoryTape(),
            make_body=lambda island: QuadraticBody(self, island, target[island.name]),
            step_s=lambda island: own_step_s[island.name],
            control_s=lambda island: latency_s,
            transfer_s=lambda island, direction, num_bytes: (
                transfer_s() if callable(transfer_s) else transfer_s
            ),
            merge_s=MERGE_S,
            pair_s=lambda *_: transfer_s() if callable(transfer_s) else transfer_s,
        )
        self.uploads = {}
        self.hidden, self.walls = set(hidden), {frozenset(pair) for pair in walls}
        self.faults = LabFaults(self, list(faults), restart_s) if faults else None
        self.checks = GossipChecks(self) if policy.topology == "gossip" else None
        if self.checks is not None:
            self.tape.watch = self.checks.saw

    def run(self, until_s: float = float("inf"), max_moments: int = 1_000_000) -> "World":
        """Run until the syncer is finished or the time is over.

        Raises:
            AssertionError: neither came within `max_moments` moments; or, of gossip, something that must hold does
                not (`farflung.testing.gossip_checks`).
        """
        for _ in range(max_moments):
            if self.finished is not None:
                if self.checks is not None:
                    self.checks.finish()
                return self
            if not self.time.step(until_s):
                return self
            if self.faults is not None:
                self.faults.review(self.syncer.ledger.tokens_trained / self.syncer.budget_tokens)
            if self.checks is not None:
                self.checks.moment()
        raise AssertionError(f"the world does not come to an end{self.story()}")

    def story(self, last: int = 60) -> str:
        """The end of the tape, for a failing assertion."""
        return self.tape.story(last)


def trainer_of(island: VirtualIsland) -> Trainer:
    """The real trainer inside a world's island."""
    assert isinstance(island.body, LocalBody)
    return island.body.trainer
