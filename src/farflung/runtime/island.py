"""An island's trainer process: the recipe's task around `farflung.Learner`.

Started by the supervisor (``python -m farflung.runtime.island``) or by ``farflung join``.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch

from farflung.config import RunConfig, read_config
from farflung.errors import UserError
from farflung.runtime.face import Learner, RunEnded
from farflung.runtime.lifeline import follow_parent
from farflung.train.loop import InnerLoop
from farflung.train.shard import OwnSteps, Shard

RESTART = 75  # exit code (EX_TEMPFAIL): start me again
CONNECT_S = 60.0  # to a syncer that this machine runs
ORDERLY = ("finished", "suspended")  # ends that nobody needs to hear about


def told(reason: str, name: str | None) -> str:
    """Why a learner ended, for a person: what happened and what to do.

    >>> told("suspended", "a")
    'suspended: start this learner again once the run goes on (farflung serve --resume)'
    """
    who = f"as {name!r}" if name is not None else "under this learner's name"
    match reason:
        case "suspended":
            return "suspended: start this learner again once the run goes on (farflung serve --resume)"
        case "fenced":
            return f"another process joined {who} and took its place; give each learner a --name of its own"
        case _ if reason.startswith("refused: incarnation "):
            return f"{reason}: another process took its place, or it was away for too long; start it again"
        case _ if reason.startswith("could not upload the first parameters"):
            return f"{reason}; start it again"
        case _ if reason.startswith("refused (token)"):
            return f"{reason}; set FARFLUNG_TOKEN to the one that `serve` printed"
        case _ if reason.startswith("nobody answered"):
            return f"{reason}; is the syncer running, and is this its address?"
        case "":
            return "it ended and nobody said why; start it again"
        case _:
            return reason


def train(config: RunConfig, **learner_options: Any) -> str:
    """Train until the run is over; returns why it was."""
    recipe = config.recipe
    torch.set_num_threads(recipe.threads)
    task = config.task()
    model = task.build_model()
    optimizer = task.build_optimizer(model)
    shard = Shard(task, recipe.num_learners)
    loop = InnerLoop(task, model, optimizer, shard, rng_seed=recipe.seed)
    with Learner(
        model, optimizer, config.method, data=shard, stateful={"schedule": OwnSteps(loop)},
        pace_s=recipe.pace_s, **learner_options,
    ) as learner:  # fmt: skip
        shard.open(learner.index)
        while not learner.done:
            result = loop.step(learner.progress)
            learner.step(result.num_tokens, result.loss)
        return learner.end_reason or ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="farflung.runtime.island")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--connect", required=True)
    parser.add_argument("--tape", type=Path)
    parser.add_argument("--save-dir", type=Path)
    args = parser.parse_args()
    follow_parent()
    sys.path.insert(0, os.getcwd())  # a recipe's own task lives beside it
    config = read_config(args.run_dir)
    try:
        reason = train(
            config, connect=args.connect, name=args.name, run=config.run, tape_path=args.tape,
            save_dir=args.save_dir, started_s=config.started_s, connect_within_s=CONNECT_S,
            ca=config.recipe.serve.ca, insecure=config.recipe.serve.insecure,
        )  # fmt: skip
    except RunEnded as error:
        reason = str(error)
        if reason not in ORDERLY:
            fail(told(reason, args.name))
    except UserError as error:
        fail(str(error))
    if reason not in ORDERLY:
        print(told(reason, args.name), file=sys.stderr)
        sys.exit(RESTART)


def fail(line: str) -> NoReturn:
    """End this process in a way that says: do not start me again."""
    print(line, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
