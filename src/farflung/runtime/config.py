"""A run's resolved configuration: what config.json holds and every process of the run reads."""

import json
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from farflung.errors import UserError
from farflung.methods import Method, from_policy, make_method
from farflung.protocol.policy import Policy
from farflung.runtime.recipe import Recipe
from farflung.tape import CONFIG, write_atomically
from farflung.train.task import DataConfig, Task, TaskConfig, load_task


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


def resolve(recipe: Recipe, run: str, *, elapsed_s: float = 0.0) -> RunConfig:
    """Fill in what a recipe leaves open.

    Args:
        elapsed_s: seconds that the run had lasted when it was stopped, for a resume.

    Raises:
        UserError: the method, its policy, the task or its data are not as they should be.
    """
    try:
        method = make_method(recipe.method, **recipe.policy)
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from None
    quorum = method.policy.quorum
    if quorum != "all" and quorum > recipe.num_learners:
        raise UserError(f"policy.quorum = {quorum}: there are only {recipe.num_learners} learners")
    task = build_task(recipe)
    budget = recipe.budget_tokens
    if budget is None:
        batch = next(task.build_batches(0, recipe.num_learners))
        budget = recipe.steps * recipe.num_learners * task.num_tokens(batch)
    return RunConfig(
        run=run, recipe=recipe, policy=method.policy, budget_tokens=budget,
        started_s=time.monotonic() - elapsed_s,
    )  # fmt: skip


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
    try:
        flat = json.loads(path.read_bytes())
        policy = msgspec.convert(flat.pop("policy"), Policy)
        run, started_s, budget = flat.pop("run"), flat.pop("started_s"), flat["budget_tokens"]
        flat.pop("versions")
        recipe = msgspec.convert(flat, Recipe)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: not a run's configuration: {error}") from None
    return RunConfig(run=run, recipe=recipe, policy=policy, budget_tokens=budget, started_s=started_s)
