"""What being a learner costs: training with `farflung.Learner` against the same loop without it.

One trainer process trains one model in blocks: bare, as a learner, bare, ... A learner block calls
`Learner.step` after each step of the loop, with a real sidecar and a real syncer in processes of their own
(decoupled, one learner, so about one fragment goes up and one comes down a step); a bare block does not. So the
ratio holds everything that a learner adds: the boundary itself (mailbox, gather, encode, adopt) and the cores,
caches and memory bandwidth that sidecar and syncer take. The first steps of each block are not timed: the
exchange gets under way, or comes to rest.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from farflung import tape
from farflung.bench.child import child
from farflung.bench.measure import Measurement, Settings, interleave
from farflung.bench.random_text import random_text
from farflung.config import RunConfig, resolve, write_config
from farflung.errors import UserError
from farflung.recipe import make_recipe
from farflung.runtime.face import Learner
from farflung.runtime.security import new_token
from farflung.train.loop import InnerLoop

AIM = 0.98
NAME = "learner-0"
ENDLESS_TOKENS = 10**15


class Blocks:
    """Blocks of training steps, with and without the learner. Each returns its timed tokens/s."""

    def __init__(self, settings: Settings, loop: InnerLoop, learner: Learner) -> None:
        self._settings, self._loop, self._learner = settings, loop, learner
        self.versions = self.steps = 0  # installed in timed steps, and how many these were
        self.boundaries_s: list[float] = []  # in `Learner.step`

    def bare(self) -> float:
        for _ in range(self._settings.lead_steps):
            self._bare_step()
        began_s = time.perf_counter()
        tokens = sum(self._bare_step() for _ in range(self._settings.block_steps))
        return tokens / (time.perf_counter() - began_s)

    def learning(self) -> float:
        # The bare steps since the last boundary are no part of a step: the syncer paces its rounds by that time.
        self._learner.restart_clock()
        for _ in range(self._settings.lead_steps):
            self._learner_step()
        held = sum(self._learner.trainer.island.versions)
        began_s = time.perf_counter()
        tokens = sum(self._learner_step() for _ in range(self._settings.block_steps))
        took_s = time.perf_counter() - began_s
        self.versions += sum(self._learner.trainer.island.versions) - held
        self.steps += self._settings.block_steps
        return tokens / took_s

    def _bare_step(self) -> int:
        return self._loop.step(self._learner.progress).num_tokens

    def _learner_step(self) -> int:
        result = self._loop.step(self._learner.progress)
        began_s = time.perf_counter()
        self._learner.step(result.num_tokens, result.loss)
        self.boundaries_s.append(time.perf_counter() - began_s)
        return result.num_tokens


def measure_learner(settings: Settings) -> Measurement:
    """Tokens/s of a decoupled learner against the bare loop."""
    with _learning(settings) as blocks:
        for warm_up in (blocks.learning, blocks.bare):
            warm_up()
        ratios, tokens_per_s = interleave(blocks.learning, blocks.bare, settings.num_blocks)
    return Measurement(
        ratios=ratios,
        reference=tokens_per_s,
        unit="tokens/s",
        what="training as a learner, sidecar and syncer beside it, against the same loop without them",
        aim=AIM,
        note=f"scale {settings.scale}; {blocks.versions / blocks.steps:.2f} fragments adopted a step; "
        f"{1e3 * median(blocks.boundaries_s):.2g} ms in Learner.step",
    )


@contextmanager
def _learning(settings: Settings) -> Iterator[Blocks]:
    """A syncer process, and one learner of its run in this process."""
    with tempfile.TemporaryDirectory(prefix="farflung-bench-") as folder:
        config, token = _config(settings, Path(folder)), new_token()
        task = config.task()
        model = task.build_model()
        optimizer, batches = task.build_optimizer(model), task.build_batches(0, 1)
        loop = InnerLoop(task, model, optimizer, batches, rng_seed=0)
        with (
            child("farflung.runtime.serve", folder, FARFLUNG_TOKEN=token) as said,
            Learner(
                model, optimizer, config.method, connect=said["url"], token=token, name=NAME, run=config.run,
                data=batches, started_s=config.started_s, tape_path=Path(folder, tape.TAPE_DIR, f"{NAME}.jsonl"),
            ) as learner,
        ):  # fmt: skip
            yield Blocks(settings, loop, learner)
            if learner.done:
                raise UserError(f"learner_throughput: the learner stopped in between: {learner.end_reason}")


def _config(settings: Settings, folder: Path) -> RunConfig:
    """A run that does not end, on text that any installation has."""
    recipe = make_recipe(
        {
            "method": "decoupled", "num_learners": 1, "scale": settings.scale, "budget_tokens": ENDLESS_TOKENS,
            "threads": settings.threads, "data": {"path": str(random_text(folder))},
        }
    )  # fmt: skip
    config = resolve(recipe, "bench")
    write_config(config, folder)
    return config
