"""`farflung compare`: recipes in the lab on equal terms, one folder each, one table and one page."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from farflung import tape
from farflung.config import RunConfig, write_config
from farflung.errors import UserError
from farflung.lab.start import lab_config, run_lab
from farflung.recipe import load_recipe
from farflung.report.closing import close_run
from farflung.report.page import render
from farflung.report.wording import num_bytes, percent, seconds
from farflung.runtime.run import new_run_dir

PAGE = "comparison.html"
TERMS: dict[str, Callable[[RunConfig], Any]] = {
    "task": lambda c: c.recipe.task,
    "data.path": lambda c: c.recipe.data.path,
    "scale": lambda c: c.recipe.scale,
    "seed": lambda c: c.recipe.seed,
    "eval_batches": lambda c: c.recipe.eval_batches,
    "token budget (budget_tokens, or steps x num_learners x batch)": lambda c: c.budget_tokens,
}
"""What must be equal for losses to compare."""


def compare(
    recipes: Sequence[Path], out: Path, settings: list[str], show: Callable[[str, dict[str, Any]], None]
) -> dict[str, dict[str, Any]]:
    """Run each recipe in the lab, write its folder and the page; returns name -> summary.

    Args:
        recipes: files; all are read and checked before the first one runs.
        out: new or empty folder.
        settings: ``a.b=c`` for every recipe.
        show: told of each evaluation, with the run's name.

    Raises:
        UserError: a recipe is wrong, or they differ in what must be equal.
    """
    configs = {name: lab_config(load_recipe(path, settings)) for name, path in _named(recipes).items()}
    check_terms(configs)
    new_run_dir(out)
    summaries = {}
    for name, config in configs.items():
        run_dir = out / name
        new_run_dir(run_dir)
        write_config(config, run_dir)
        results = run_lab(config, run_dir, lambda record, name=name: show(name, record))  # type: ignore[misc]
        summaries[name] = close_run(run_dir, results)
    folders = [out / name for name in configs]
    tape.write_atomically(out / PAGE, render(folders).encode())
    tape.write_atomically(out / tape.SUMMARY, json.dumps(summaries, indent=2).encode())
    return summaries


def _named(recipes: Sequence[Path]) -> dict[str, Path]:
    """Names for folders: the files' own, numbered where they repeat."""
    named: dict[str, Path] = {}
    for path in recipes:
        name, number = path.stem, 1
        while name in named:
            number += 1
            name = f"{path.stem}-{number}"
        named[name] = path
    return named


def check_terms(configs: dict[str, RunConfig]) -> None:
    """Raise UserError unless all train on equal terms."""
    for term, of in TERMS.items():
        values = {name: of(config) for name, config in configs.items()}
        if len(set(values.values())) > 1:
            given = ", ".join(f"{name}: {value}" for name, value in values.items())
            raise UserError(f"compare needs equal terms; these differ in {term} ({given})")


def comparison_table(summaries: dict[str, dict[str, Any]]) -> Table:
    """One row a run."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("run", overflow="fold")
    for heading in ("loss", "goodput", "uptime", "merged", "bytes up", "bytes down", "virtual time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, s in summaries.items():
        table.add_row(
            name, f"{s['eval_loss_final']:.3f}", percent(s["goodput"]), percent(s["uptime"]),
            percent(s["merged_share"]), num_bytes(s["bytes_up"]), num_bytes(s["bytes_down"]),
            seconds(s["wall_s"]),
        )  # fmt: skip
    return table
