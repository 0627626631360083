"""A run's resolved configuration: what config.json holds and every process of the run reads."""

import json
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from farflung.core.fragments import make_plan
from farflung.core.vectors import describe
from farflung.errors import UserError, did_you_mean
from farflung.methods import METHODS, Method, from_policy, make_method
from farflung.protocol.policy import Policy
from farflung.recipe import Recipe
from farflung.tape import CONFIG, write_atomically
from farflung.train.task import DataConfig, Task, TaskConfig, load_task

REFERENCE = "data_parallel"  # a method of the lab alone


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe with every default filled in.

    `started_s` is the run's start on the monotonic clock of the machine that made this.
    """

    run: str
    recipe: Recipe
    policy: Policy
    budget_tokens: int
    started_s: float

    @property
    def method(self) -> Method:
        return from_policy(self.policy)

    def task(self) -> Task:
        return build_task(self.recipe)

    def clock(self) -> float:
        """Seconds since the run's start."""
        return time.monotonic() - self.started_s


def build_task(recipe: Recipe) -> Task:
    return load_task(
        recipe.task,
        TaskConfig(
            seed=recipe.seed, scale=recipe.scale, batch_size=recipe.batch_size, lr=recipe.lr,
            warmup_steps=recipe.warmup_steps, eval_batches=recipe.eval_batches,
            data=DataConfig(path=recipe.data.path),
        ),
    )  # fmt: skip


def resolve(recipe: Recipe, run: str, *, trains: bool = True) -> RunConfig:
    """Fill in what a recipe leaves open, and find what cannot be before anything is started.

    Args:
        trains: the recipe's task is trained. False for a syncer of its own, which needs no model: with
            `budget_tokens` given the task is not looked at, so learners may bring any model.

    Raises:
        UserError: the method, its policy, the task, its data or the fragment plan are not as they should be.
    """
    if recipe.method == REFERENCE:
        raise UserError(
            f"method = {REFERENCE!r} is the lab's reference (`farflung lab`, `compare`); "
            "to train so for real use PyTorch's own: torchrun with DistributedDataParallel"
        )
    try:
        method = make_method(recipe.method, **recipe.policy)
    except (ValueError, TypeError) as error:
        raise UserError(f"policy: {error}" if recipe.method in METHODS else str(error)) from None
    _check_gossip(method, recipe)
    quorum = method.policy.quorum
    if quorum != "all" and quorum > recipe.num_learners:
        raise UserError(
            f"policy.quorum = {quorum}: there are only {recipe.num_learners} learners (num_learners)"
        )
    budget = recipe.budget_tokens
    if trains or budget is None:
        task = build_task(recipe)
        _check_plan(task, method)
        budget = budget_of(recipe, task)
    return RunConfig(
        run=run, recipe=recipe, policy=method.policy, budget_tokens=budget, started_s=time.monotonic()
    )


def _check_gossip(method: Method, recipe: Recipe) -> None:
    """Find settings under which learners would drift apart for ever, and names of nobody."""
    try:
        problem = method.unstable(recipe.num_learners)
    except ValueError as error:  # a matching that so many learners cannot keep to
        problem = str(error)
    if problem is not None:
        raise UserError(f"policy: {problem}")
    for name in method.policy.local_steps:
        if name not in recipe.learners():
            raise UserError(
                f"policy.local_steps.{name}: no such learner{did_you_mean(name, recipe.learners())}"
            )


def budget_of(recipe: Recipe, task: Task) -> int:
    """Tokens of the whole run. UserError for a text that is too short."""
    batch = next(task.build_batches(0, recipe.num_learners))
    return recipe.budget_tokens or recipe.steps * recipe.num_learners * task.num_tokens(batch)


def expected_fingerprint(config: RunConfig) -> str | None:
    """What a served run's learners must have if its recipe's task is trained; None: any model will do."""
    if config.recipe.budget_tokens is not None:
        return None
    policy, described = config.policy, describe(config.task().build_model())
    return make_plan(described, policy.num_fragments, policy.fragment_plan).fingerprint()


def _check_plan(task: Task, method: Method) -> None:
    """Lay the task's model out as every learner will."""
    try:
        make_plan(describe(task.build_model()), method.policy.num_fragments, method.policy.fragment_plan)
    except ValueError as error:
        raise UserError(f"policy: {error}") from None


def write_config(config: RunConfig, run_dir: Path) -> None:
    """config.json: flat, for people; and everything that `read_config` needs."""
    import torch  # only its version: the torch-free parts import this module's neighbours, not this

    flat: dict[str, Any] = {
        **msgspec.to_builtins(config.recipe),
        "policy": msgspec.to_builtins(config.policy),
        "budget_tokens": config.budget_tokens,
        "run": config.run,
        "started_s": config.started_s,
        "versions": {
            "farflung": version("farflung"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    write_atomically(run_dir / CONFIG, json.dumps(flat, indent=2).encode())


def read_config(run_dir: Path) -> RunConfig:
    """Read what `write_config` wrote. UserError when it is not there or not ours."""
    path = run_dir / CONFIG
    if not path.is_file():
        raise UserError(f"{run_dir}: not a run folder: there is no {CONFIG}")
    try:
        flat = json.loads(path.read_bytes())
        policy = msgspec.convert(flat.pop("policy"), Policy)
        run, started_s, budget = flat.pop("run"), flat.pop("started_s"), flat["budget_tokens"]
        flat.pop("versions")
        recipe = msgspec.convert(flat, Recipe)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a run's configuration: {error}") from None
    return RunConfig(run=run, recipe=recipe, policy=policy, budget_tokens=budget, started_s=started_s)
