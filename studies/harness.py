"""What a study is, and how its cells get done and kept.

A study plans cells; each is a recipe, seed included. Cells with equal seeds train from equal weights on equal
data in equal order, so differences between variants are paired. Finished cells are in ``NAME.json`` at once:
a study that was interrupted goes on where it was. ``NAME.md`` and the picture are made from that file alone.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from farflung.tape import write_atomically
from studies.measure import Figures, measure

RESULTS = Path(__file__).parents[1] / "docs" / "results"
SEEDS = (1, 2, 3)
WORKERS = 2

INNER_LR = 4e-3
OUTER_LR = 0.7
OUTER_MOMENTUM = 0.5

Row = dict[str, Any]
"""A finished cell: ``parameters``, ``seed``, ``recipe`` and its figures."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A run to be done.

    Attributes:
        parameters: what tells it from the study's other cells, apart from the seed.
        recipe: the whole recipe, as plain values.
    """

    parameters: Mapping[str, Any]
    recipe: Mapping[str, Any]

    @property
    def key(self) -> str:
        return key(self.recipe)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence that the study was to test, the figures that decide it, and whether it holds."""

    claim: str
    figure: str
    holds: bool


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question and how it is answered.

    Attributes:
        name: of its files.
        plan: what is to be run, given the rows so far; asked again until it wants nothing new.
        claims, picture, page: made from the rows.
    """

    name: str
    plan: Callable[[list[Row]], list[Cell]]
    claims: Callable[[list[Row]], list[Claim]]
    picture: Callable[[list[Row]], Figure]
    page: Callable[[list[Row], list[Claim]], str]


def key(recipe: Mapping[str, Any]) -> str:
    """Equal recipes are the same cell."""
    return json.dumps(recipe, sort_keys=True)


def base_recipe(seed: int, **overrides: Any) -> dict[str, Any]:
    """The recipe that all studies vary: scale micro, 800 steps a learner, evaluated on 1920 windows.

    A step takes a virtual second, links and merges a few hundredths. So that a study takes minutes the batch is
    4 windows of 64 bytes, a quarter of the task's default. Three values follow from such short, noisy runs: the
    inner lr is `INNER_LR`, the outer lr `OUTER_LR` and the outer momentum `OUTER_MOMENTUM`. With the defaults
    (1e-2, and 0.9) two runs that differed by the rounding of bf16 ended 3 to 5 % apart, and all of them a tenth
    worse; with these it is about one percent. 800 steps at H = 24 are 33 rounds, few for a momentum of ten.
    """
    lab = {"step_s": 1.0, "latency_s": 0.02, "merge_s": 0.05, "workers": 0} | overrides.pop("lab", {})
    outer = {"outer_lr": OUTER_LR, "outer_momentum": OUTER_MOMENTUM}
    return {
        "method": "decoupled", "scale": "micro", "steps": 800, "batch_size": 4, "lr": INNER_LR, "seed": seed,
        "evals": 0, "eval_batches": 60, "policy": outer | overrides.pop("policy", {}), "lab": lab, **overrides,
    }  # fmt: skip


def run(
    study: Study,
    folder: Path = RESULTS,
    do: Callable[[list[Cell]], Iterator[tuple[Cell, Figures]]] | None = None,
    show: Callable[[str], None] = print,
) -> None:
    """Do the cells that are missing, keep each as it is finished, and write the results anew.

    Args:
        do: takes cells, gives each back with its figures, in any order; None: `in_processes`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while todo := missing(study, load(study, folder)):
        show(f"{study.name}: {len(todo)} cells to do")
        for cell, figures in (do or in_processes)(todo):
            row = row_of(cell, figures)
            save(study, folder, [*load(study, folder), row])
            show(f"{study.name}: {dict(cell.parameters)} seed {row['seed']}: loss {row['eval_loss']:.4f}")
    report(study, folder)


def in_processes(cells: list[Cell], workers: int = WORKERS) -> Iterator[tuple[Cell, Figures]]:
    """Cells side by side, one thread each: on few cores faster than islands side by side."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(measure, dict(cell.recipe)): cell for cell in cells}
        for future in as_completed(futures):
            yield futures[future], future.result()


def row_of(cell: Cell, figures: Figures) -> Row:
    recipe = dict(cell.recipe)
    return {"parameters": dict(cell.parameters), "seed": recipe["seed"], **figures, "recipe": recipe}


def report(study: Study, folder: Path = RESULTS) -> None:
    """Write claims, picture and page from the cells in the study's file."""
    everything = load(study, folder)
    save(study, folder, everything)
    rows = wanted(study, everything)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": study.name}):
        study.picture(rows).savefig(folder / f"{study.name}.svg", metadata={"Date": None})
    text = study.page(rows, study.claims(rows))
    write_atomically(folder / f"{study.name}.md", f"{text.strip()}\n".encode())


def load(study: Study, folder: Path) -> list[Row]:
    path = folder / f"{study.name}.json"
    return json.loads(path.read_bytes())["cells"] if path.is_file() else []


def save(study: Study, folder: Path, rows: list[Row]) -> None:
    """One line a cell, each cell once. Claims are there once every cell that they need is."""
    rows = list({key(row["recipe"]): row for row in rows}.values())
    chosen = wanted(study, rows)
    done = not missing(study, rows)
    claims = [vars(claim) for claim in study.claims(chosen)] if done else []
    lines = ",\n".join(json.dumps(row) for row in rows)
    text = f'{{"cells": [\n{lines}\n],\n"claims": {json.dumps(claims, indent=1)}}}\n'
    write_atomically(folder / f"{study.name}.json", text.encode())


def wanted(study: Study, rows: list[Row]) -> list[Row]:
    """The rows that the study plans now, in its order: a file may hold cells of an earlier plan."""
    by_key = {key(row["recipe"]): row for row in rows}
    return [by_key[cell.key] for cell in study.plan(rows) if cell.key in by_key]


def missing(study: Study, rows: list[Row]) -> list[Cell]:
    done = {key(row["recipe"]) for row in rows}
    return [cell for cell in study.plan(rows) if cell.key not in done]


# ---- rows, summarised --------------------------------------------------------------------------------


def where(rows: Iterable[Row], **parameters: Any) -> list[Row]:
    """Rows with these parameters, by seed."""
    found = [r for r in rows if all(r["parameters"].get(k) == v for k, v in parameters.items())]
    return sorted(found, key=lambda r: r["seed"])


def mean(rows: Iterable[Row], figure: str) -> float:
    return fmean(row[figure] for row in rows)


def paired(rows: list[Row], reference: list[Row], figure: str = "eval_loss") -> list[float]:
    """Relative differences ``x / reference - 1`` at equal seeds."""
    other = {row["seed"]: row[figure] for row in reference}
    return [row[figure] / other[row["seed"]] - 1 for row in rows if row["seed"] in other]
