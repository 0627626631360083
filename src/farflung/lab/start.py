"""A recipe into the lab: whichever method it names, the reference too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from farflung.config import REFERENCE, RunConfig, resolve
from farflung.lab.data_parallel import DataParallel, data_parallel_config
from farflung.lab.lab import Lab
from farflung.recipe import Recipe


def lab_config(recipe: Recipe) -> RunConfig:
    """Resolve a recipe for the lab; its run's id derives from the seed.

    Raises:
        UserError: as `farflung.config.resolve`.
    """
    run = f"lab-{recipe.seed}"
    if recipe.method == REFERENCE:
        return data_parallel_config(recipe, run)
    return msgspec.structs.replace(resolve(recipe, run), started_s=0.0)


def run_lab(
    config: RunConfig, run_dir: Path | None, show: Callable[[dict[str, Any]], None] = lambda r: None
) -> dict[str, Any]:
    """Run it in virtual time; returns what only the driver knows. `show` gets every evaluation."""
    kind = DataParallel if config.recipe.method == REFERENCE else Lab
    return kind(config, run_dir, show).go()
