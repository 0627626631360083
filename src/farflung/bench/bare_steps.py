"""The process behind `lab_overhead`'s reference: inner steps of some learners, and nothing else.

``python -m farflung.bench.bare_steps FOLDER INDEX...``: after a first line it takes a number of steps a line, and
answers each when every learner, built anew as the lab builds its own, has taken so many.
"""

import sys
from pathlib import Path

import torch

from farflung.config import read_config
from farflung.train.loop import InnerLoop


def main() -> None:
    config = read_config(Path(sys.argv[1]))
    torch.set_num_threads(config.recipe.threads)
    task = config.task()

    def new_loop(index: int) -> InnerLoop:
        model = task.build_model()
        batches = task.build_batches(index, config.recipe.num_learners)
        return InnerLoop(task, model, task.build_optimizer(model), batches, rng_seed=config.recipe.seed)

    print("ready", flush=True)
    for line in sys.stdin:
        loops = [new_loop(int(index)) for index in sys.argv[2:]]
        for _ in range(int(line)):
            for loop in loops:
                loop.step(0.5)
        print("done", flush=True)


if __name__ == "__main__":
    main()
