"""The reference: data-parallel training under virtual time. Gradients are averaged in every step.

It trains the same task on the same shards, one batch a learner and step, with the same step times, links and
faults as the other methods, so that only the method differs. A step lasts as long as the slowest learner that
takes part, and then a ring all-reduce; nothing overlaps. All replicas are equal: one model stands for them.

A learner that is killed or frozen stops everybody until it is back. If the group is elastic, it goes on without a
learner that will be away for longer than `reconfigure_s`: leaving it, and taking it in again, costs that time; who
is back before a reconfiguration under way has ended is taken in by it, as in `simulate`. A kill in the middle of a
step loses the step; freezes and slow spells begin at the next boundary. What DistributedDataParallel of PyTorch
does otherwise: it overlaps the all-reduce with the backward pass, and a job that lost a member starts again from
a checkpoint. Buffers (BatchNorm statistics) see every learner's batches, in turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from farflung.chaos.plan import Fault
from farflung.config import REFERENCE, RunConfig, budget_of, build_task
from farflung.core.fragments import make_plan
from farflung.core.vectors import describe
from farflung.engine.hub import HubState
from farflung.engine.island import Island
from farflung.errors import UserError, did_you_mean, field_error
from farflung.lab.body import Slots
from farflung.lab.chronicle import Chronicle
from farflung.lab.links import link_specs, shared_uplinks
from farflung.lab.network import LinkSpec, SharedUplink
from farflung.lab.step_times import StepTimes
from farflung.methods import diloco
from farflung.protocol.policy import Policy
from farflung.recipe import Recipe
from farflung.train.loop import InnerLoop

FAULTS = ("kill", "freeze", "slow")
FP32_BYTES = 4


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the recipe's [policy] table may say.

    Args:
        elastic: go on without learners that are away.
        reconfigure_s: virtual seconds to leave a learner behind, or to take one in again.
    """

    elastic: bool = False
    reconfigure_s: float = 5.0


def options_of(recipe: Recipe) -> Options:
    """Check the options and the fault plan. UserError for what does not exist here."""
    for name in recipe.policy:
        if name not in Options.__struct_fields__:
            hint = did_you_mean(name, Options.__struct_fields__)
            raise UserError(f"policy: method '{REFERENCE}' has no option {name!r}{hint}")
    for number, fault in enumerate(recipe.plan(), 1):
        if fault.kind not in FAULTS:
            raise UserError(
                f"fault {number}: method '{REFERENCE}' knows {', '.join(FAULTS)}, not {fault.kind}"
            )
    try:
        options = msgspec.convert(recipe.policy, Options)
    except msgspec.ValidationError as error:
        raise UserError(f"policy: {field_error(error, Options)}") from None
    if not 0 <= options.reconfigure_s < float("inf"):
        raise UserError(f"policy: reconfigure_s = {options.reconfigure_s}: must be at least 0")
    return options


def data_parallel_config(recipe: Recipe, run: str) -> RunConfig:
    """As `farflung.config.resolve`. Reports see a method that merges one fragment in every step."""
    quorum: int | Literal["all"] = 1 if options_of(recipe).elastic else "all"
    policy = Policy(
        method=REFERENCE, pace="lockstep", num_fragments=1, sync_every_steps=1, overlap_steps=0, quorum=quorum,
        merge="avg", weighting="equal", outer="sgd", outer_lr=1.0, final="none",
    )  # fmt: skip
    return RunConfig(
        run=run, recipe=recipe, policy=policy, budget_tokens=budget_of(recipe, build_task(recipe)),
        started_s=0.0,
    )  # fmt: skip


def all_reduce_s(num_bytes: int, links: Sequence[LinkSpec], share_bps: float = float("inf")) -> float:
    """Seconds of a ring all-reduce: ``2 (n - 1) / n bytes / min bandwidth + 2 (n - 1) latency``.

    Args:
        num_bytes: of the gradients.
        links: of those who take part; the slowest way of any of them counts, and the longest latency.
        share_bps: what a shared uplink leaves to one of its users.

    >>> all_reduce_s(1000, [LinkSpec(latency_s=0.5, up_bps=8000.0)] * 2)
    2.0
    """
    n = len(links)
    if n < 2:
        return 0.0
    bps = min(share_bps, *(min(link.up_bps, link.down_bps) for link in links))
    return 2 * (n - 1) / n * 8 * num_bytes / bps + 2 * (n - 1) * max(link.latency_s for link in links)


@dataclass
class Replica:
    """One learner: its data, and where it is."""

    name: str
    loop: InnerLoop  # of the one model, on this learner's shard
    link: LinkSpec
    away_until_s: float = 0.0
    slow_until_s: float = 0.0
    factor: float = 1.0
    out: bool = False  # the group goes on without it
    killed: bool = False  # and not yet back


class DataParallel:
    """One run in virtual time.

    Args:
        config: of `data_parallel_config`.
        run_dir: where tape, metrics and model go; None keeps nothing but the figures.
        show: called with each evaluation.
    """

    def __init__(
        self, config: RunConfig, run_dir: Path | None, show: Callable[[dict[str, Any]], None] = lambda r: None
    ) -> None:
        recipe = config.recipe
        torch.set_num_threads(recipe.threads)
        self.config, self.recipe, self.run_dir, self._show = config, recipe, run_dir, show
        self.options, self.task, self.now = options_of(recipe), config.task(), 0.0
        self.model = self.task.build_model()
        optimizer = self.task.build_optimizer(self.model)
        links = link_specs(recipe)
        self.replicas = [
            Replica(name, self._loop(optimizer, index), links[name])
            for index, name in enumerate(recipe.learners())
        ]
        self._leader = self._loop(optimizer, 0)  # takes the steps; who is alive does not matter to it
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        self._gradient_bytes = FP32_BYTES * sum(p.numel() for p in self._trained)
        self._uplinks: list[SharedUplink] = shared_uplinks(recipe)
        self._step_times = StepTimes(recipe)
        self._faults: list[Fault] = list(recipe.plan())
        self._first_step_s: float | None = None
        self.tokens = self.bytes_moved = self._evaluated = 0
        self.evals: list[dict[str, Any]] = []
        self.chronicle = Chronicle(config, run_dir, msgspec.to_builtins(self.options))

    def _loop(self, optimizer: torch.optim.Optimizer, index: int) -> InnerLoop:
        batches = self.task.build_batches(index, self.recipe.num_learners)
        return InnerLoop(self.task, self.model, optimizer, batches, rng_seed=self.recipe.seed)

    def go(self) -> dict[str, Any]:
        """Run to the end; returns what only the driver knows of it."""
        try:
            for replica in self.replicas:
                self.chronicle.joined(self.now, replica.name, "birth")
            self._evaluate()
            while self.tokens < self.config.budget_tokens:
                self._step(self._gather())
                self._review()
            self._evaluate()
            self.chronicle.finished(self.now, self.tokens)
            return self._results()
        finally:
            self.chronicle.close()

    # ---- who takes part ------------------------------------------------------------------------------

    def _gather(self) -> list[Replica]:
        """Let time pass until the next step may begin; returns those who take it, in sorted order."""
        while True:
            self._strike()
            away = [r for r in self.replicas if r.away_until_s > self.now]
            if self.options.elastic and len(away) < len(self.replicas):
                if self._reconfigure(away):
                    continue
                away = [r for r in away if not r.out]  # not long enough to go on without them
            if not away:
                members = [r for r in self.replicas if not r.out]
                for replica in members:
                    self._back(replica)
                return members
            moments = [r.away_until_s for r in away]
            self.now = min(moments) if self.options.elastic else max(moments)

    def _reconfigure(self, away: list[Replica]) -> bool:
        """Leave behind who will be away for long, take in who is back. Whether there was anybody."""
        left_s = self.now + self.options.reconfigure_s
        leaving = [r for r in away if not r.out and r.away_until_s > left_s]
        if not leaving and all(r in away for r in self.replicas if r.out):
            return False
        for replica in leaving:
            replica.out = True
            self.chronicle.lost(self.now, replica.name, "the others went on")
        for replica in self.replicas:
            if replica.away_until_s <= left_s:
                replica.out = False
        self.now = left_s
        return True

    def _back(self, replica: Replica) -> None:
        if replica.killed:
            replica.killed = False
            self.chronicle.restarted(replica.away_until_s, replica.name)
        self.chronicle.present(self.now, replica.name)

    def _strike(self) -> None:
        """Begin the faults whose moment has come; one whose target is away waits until it is back."""
        if self._first_step_s is None:
            return
        progress, since_s = self.tokens / self.config.budget_tokens, self.now - self._first_step_s
        for fault in list(self._faults):
            replica = next(r for r in self.replicas if r.name == fault.target)
            if fault.due(progress, since_s) and replica.away_until_s <= self.now and not replica.out:
                self._faults.remove(fault)
                self.chronicle.fault(self.now, fault)
                self._befall(replica, fault)

    def _befall(self, replica: Replica, fault: Fault) -> None:
        if fault.kind == "slow":
            replica.factor, replica.slow_until_s = fault.factor, self.now + (fault.for_s or 0.0)
        elif fault.kind == "freeze":
            replica.away_until_s = self.now + (fault.for_s or 0.0)
        else:
            replica.killed = True
            replica.away_until_s = self.now + self.recipe.restart_s + self.recipe.lab.startup_s
            self.chronicle.lost(self.now, replica.name, "killed")

    # ---- steps ---------------------------------------------------------------------------------------

    def _step(self, members: list[Replica]) -> None:
        """One step of all members, unless a kill breaks it."""
        own_s = {r.name: self._own_s(r) for r in members}
        end_s = self.now + max(own_s.values()) + self._all_reduce_s(members)
        broken_s = self._next_kill_s(members, end_s)
        if broken_s is not None:
            self.now = broken_s
            return
        progress_tokens, progress = self.tokens, min(1.0, self.tokens / self.config.budget_tokens)
        lr = self._leader.set_lr(progress)
        results = {r.name: r.loop.backward() for r in members}
        average_gradients_(self._trained, len(members))
        self._leader.update()
        for replica in members:
            loss, num_tokens = results[replica.name]
            self.tokens += num_tokens
            self.chronicle.stepped(
                end_s, replica.name, tokens=num_tokens, step_s=own_s[replica.name],
                wait_s=end_s - self.now - own_s[replica.name], loss=loss.item(), lr=lr,
                progress_tokens=progress_tokens, cursor=replica.loop.batches.cursor,
            )  # fmt: skip
        self.now = end_s
        self._first_step_s = end_s if self._first_step_s is None else self._first_step_s
        moved = 2 * (len(members) - 1) * self._gradient_bytes
        self.bytes_moved += moved
        self.chronicle.all_reduced(
            end_s, [r.name for r in members], sum(n for _, n in results.values()), moved // len(members)
        )

    def _own_s(self, replica: Replica) -> float:
        slow = replica.factor if self.now < replica.slow_until_s else 1.0
        return slow * self._step_times.next_s(replica.name)

    def _all_reduce_s(self, members: list[Replica]) -> float:
        names = {r.name for r in members}
        users = [(u.bps, len(names & set(u.learners))) for u in self._uplinks]
        share_bps = min((bps / n for bps, n in users if n), default=float("inf"))
        pretended = self.recipe.lab.model_bytes
        num_bytes = self._gradient_bytes if pretended is None else round(pretended)
        return all_reduce_s(num_bytes, [r.link for r in members], share_bps)

    def _next_kill_s(self, members: list[Replica], end_s: float) -> float | None:
        """When a kill falls into the step that is to end then."""
        if self._first_step_s is None:
            return None
        names = {r.name for r in members}
        kills = [f for f in self._faults if f.kind == "kill" and f.at_s is not None and f.target in names]
        moments = [self._first_step_s + f.at_s for f in kills if f.at_s is not None]
        return min((at for at in moments if self.now < at < end_s), default=None)

    # ---- watching ------------------------------------------------------------------------------------

    def _review(self) -> None:
        progress, evals = self.tokens / self.config.budget_tokens, self.recipe.evals
        if evals and progress < 1 and progress * (evals + 1) >= self._evaluated + 1:
            self._evaluated = int(progress * (evals + 1))
            self._evaluate()

    def _evaluate(self) -> None:
        record = {
            "t": self.now, "kind": "eval", "tokens": self.tokens, **self.task.evaluation(self.model),
            "bytes_up": self.bytes_moved, "bytes_down": self.bytes_moved,
        }  # fmt: skip
        self.evals.append(record)
        self.chronicle.metric(record)
        self._show(record)

    def _results(self) -> dict[str, Any]:
        hub = self._as_hub()
        if self.run_dir is not None:
            self.chronicle.model(hub.model_tensors())
        return {
            "outcome": "finished", "bytes_up": self.bytes_moved, "bytes_down": self.bytes_moved,
            "rejoins": self.chronicle.rejoins, "digest": hub.model_digest(), "kills": self.chronicle.kills,
            "wall_s": self.now,
        }  # fmt: skip

    def _as_hub(self) -> HubState:
        """The parameters as a hub would hold them: one digest and one file format for all methods."""
        method = diloco()
        plan = make_plan(describe(self.model), 1, method.policy.fragment_plan)
        hub = HubState(plan, method)
        slots = Slots(hub.value_size)
        Island(self.model, plan, method, Slots(hub.payload_size), slots).seed()
        hub.seed(0, slots(0))
        return hub


def average_gradients_(parameters: Sequence[torch.Tensor], num_learners: int) -> None:
    """``g <- sum_m g_m / n`` in place; the sums were made by the backward passes, in sorted order."""
    if num_learners > 1:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= num_learners
