"""A recipe's task as the trainer of a virtual island."""

from farflung.config import RunConfig
from farflung.core.fragments import FragmentPlan, make_plan
from farflung.core.vectors import describe
from farflung.engine.make import make_island, slot_sizes
from farflung.engine.trainer import Trainer
from farflung.lab.body import LocalBody, Slots, StateSlot
from farflung.train.base import Task
from farflung.train.inner import ModelInner
from farflung.train.loop import InnerLoop
from farflung.train.shard import OwnSteps, Shard


def task_body(config: RunConfig, task: Task) -> LocalBody:
    """A fresh model, optimizer and loop, as a new process of an island would build them."""
    method, recipe = config.method, config.recipe
    model = task.build_model()
    optimizer = task.build_optimizer(model)
    plan = make_plan(describe(model), method.policy.num_fragments, method.policy.fragment_plan)
    shard = Shard(task, recipe.num_learners)
    loop = InnerLoop(task, model, optimizer, shard, rng_seed=recipe.seed)
    inner = ModelInner(model, optimizer, shard, {"schedule": OwnSteps(loop)})
    up, down = slot_sizes(plan, method)
    uplink, downlink, state = Slots(up), Slots(down), StateSlot()
    island, its_inner = make_island(model, plan, method, uplink, downlink, inner)
    trainer = Trainer(island, its_inner, put_state=state.put, get_state=state.get, save=lambda: None)

    def step(progress: float) -> tuple[int, float]:
        if trainer.begun is not None:
            shard.open(trainer.begun.index)
        result = loop.step(progress)
        inner.count_step()
        return result.num_tokens, result.loss

    return LocalBody(trainer, step, uplink, downlink, state)


def task_plan(config: RunConfig, task: Task) -> FragmentPlan:
    """The fragment plan that every member of the run has."""
    policy = config.policy
    return make_plan(describe(task.build_model()), policy.num_fragments, policy.fragment_plan)
