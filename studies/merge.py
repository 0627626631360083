"""Does a merge that keeps the norm spare the tuning of the outer learning rate? (Decoupled DiLoCo)"""

from itertools import pairwise
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from studies.harness import OUTER_LR, SEEDS, Cell, Claim, Row, Study, base_recipe, paired, where
from studies.pages import (
    AMBER,
    BLUE,
    GREEN,
    RED,
    SKY,
    change,
    label,
    legend,
    line,
    losses,
    markdown,
    panels,
)  # fmt: skip
from studies.pages import page as write_page

NUMS_LEARNERS = [2, 4, 8]
GRID = [0.5, 1.0, 1.4]  # for plain Avg, beside the usual 0.7


QUESTION = """Outer gradients of different learners are almost orthogonal, so their average shrinks with M.
Does RDA, which keeps the norm, spare the tuning of the outer learning rate, and which one does plain Avg
need? (Decoupled DiLoCo: text score with Avg 54.1 and 52.7 at M = 8 and 16, with RDA 55.4 and 54.5)"""

SETUP = """M equal learners in lockstep, so that every merge holds all of them; P = 8, H = 24, tau = 2. The
embedding is always averaged; "RDA" or "Avg" is what happens to all else. Scale micro, 800 steps a learner
of 4 windows, inner lr 4e-3, outer momentum 0.5 (why: `studies/harness.py`); three seeds, paired by weights
and data order. More learners see more tokens. The grid of Avg's outer lr (0.5 to 1.4) is run at the first
seed, its best at all."""

MEANING = """RDA is ahead at M = 4 and M = 8, by less than one percent but at every seed, and not at M = 2:
the paper's direction, at the edge of what these runs resolve. No outer lr of the grid brings Avg further:
from 1.0 on it is far worse at every M. A larger outer lr lengthens the step of the embedding too, which RDA
leaves as it is; that is the likely cause, and a reason to prefer the merge to the knob. The lead is small
because there is little to restore here: in a run of 200 steps the norm of an average was mostly 0.8 to 1.0
of RDA's, at M = 8 as at M = 2, where orthogonal outer gradients would give 0.35 and 0.71. After 24 steps
from one point, learners of this size still move in much the same direction."""

LIMITS = """How much RDA gives where outer gradients are nearly orthogonal, the paper's case: large models,
M = 16. Whether Avg with an outer lr of its own for the embedding would match RDA. The grid is coarse and
judged at one seed; a rounding error alone moves a run by about one percent (study `compression`: bf16
against fp32)."""


def plan(rows: list[Row]) -> list[Cell]:
    """Both merges at all seeds; for Avg a grid of outer lr at the first seed, and its best at the others."""
    first, *others = SEEDS
    cells = [_cell(merge, m, OUTER_LR, first) for m in NUMS_LEARNERS for merge in ("rda", "avg")]
    cells += [_cell("avg", m, lr, first) for m in NUMS_LEARNERS for lr in GRID]
    cells += [
        _cell(merge, m, OUTER_LR, seed) for seed in others for m in NUMS_LEARNERS for merge in ("rda", "avg")
    ]
    for m in NUMS_LEARNERS:
        best = best_lr(rows, m)
        if best not in (None, OUTER_LR):
            cells += [_cell("avg", m, best, seed) for seed in others]
    return cells


def best_lr(rows: list[Row], num_learners: int) -> float | None:
    """The outer lr at which plain Avg does best at the first seed, once the grid is done."""
    tried = [r for r in where(rows, merge="avg", num_learners=num_learners) if r["seed"] == SEEDS[0]]
    if len(tried) < 1 + len(GRID):
        return None
    best = min(tried, key=lambda row: float(row["eval_loss"]))
    return float(best["parameters"]["outer_lr"])


def _cell(merge: str, num_learners: int, outer_lr: float, seed: int) -> Cell:
    """In lockstep, so that every merge holds every learner. The embedding is always averaged."""
    policy: dict[str, Any] = {
        "pace": "lockstep", "quorum": "all", "num_fragments": 8, "merge": merge, "outer_lr": outer_lr,
    }  # fmt: skip
    return Cell(
        parameters={"merge": merge, "num_learners": num_learners, "outer_lr": outer_lr},
        recipe=base_recipe(seed, num_learners=num_learners, policy=policy),
    )


def claims(rows: list[Row]) -> list[Claim]:
    def of(merge: str, m: int, lr: float | None = OUTER_LR) -> list[Row]:
        return where(rows, merge=merge, num_learners=m, outer_lr=lr)

    worse = {m: paired(of("avg", m), of("rda", m)) for m in NUMS_LEARNERS}
    best = {m: best_lr(rows, m) for m in NUMS_LEARNERS}
    tuned = {m: paired(of("avg", m, best[m]), of("rda", m)) for m in NUMS_LEARNERS}
    few, many = NUMS_LEARNERS[0], NUMS_LEARNERS[-1]
    return [
        *(
            Claim(
                claim=f"M = {m}: RDA is better than Avg at the same outer lr {OUTER_LR}",
                figure=f"Avg {change(worse[m])}", holds=min(worse[m]) > 0,
            )
            for m in NUMS_LEARNERS
        ),
        Claim(
            claim="RDA's lead grows with M",
            figure=f"{change(worse[few])} at {few}, {change(worse[many])} at {many}",
            holds=fmean(worse[many]) > fmean(worse[few]),
        ),
        Claim(
            claim="the outer lr that plain Avg wants grows with M",
            figure=", ".join(f"{best[m]} at {m}" for m in NUMS_LEARNERS),
            holds=all((best[a] or 0) <= (best[b] or 0) for a, b in pairwise(NUMS_LEARNERS))
            and (best[few] or 0) < (best[many] or 0),
        ),
        *(
            Claim(
                claim=f"M = {m}: Avg with its best outer lr matches RDA (within 0.5 %)",
                figure=change(tuned[m]), holds=fmean(tuned[m]) < 0.005,
            )
            for m in NUMS_LEARNERS
        ),
    ]  # fmt: skip


def picture(rows: list[Row]) -> Figure:
    """Loss over M for both merges; Avg's loss over its outer lr."""
    figure, (left, right) = panels(2)
    for name, merge, colour in (("Avg", "avg", AMBER), ("RDA", "rda", BLUE)):
        points = [
            (float(m), [r["eval_loss"] for r in where(rows, merge=merge, num_learners=m, outer_lr=OUTER_LR)])
            for m in NUMS_LEARNERS
        ]
        line(left, name, colour, points)
    left.set_xscale("log", base=2)
    left.set_xticks(NUMS_LEARNERS, [str(m) for m in NUMS_LEARNERS])
    label(left, "learners M", f"held-out loss, nats, at outer lr {OUTER_LR}")
    legend(left)
    for m, colour in zip(NUMS_LEARNERS, (GREEN, SKY, RED), strict=True):
        tried = sorted(where(rows, merge="avg", num_learners=m), key=lambda r: r["parameters"]["outer_lr"])
        points = [(r["parameters"]["outer_lr"], [r["eval_loss"]]) for r in tried if r["seed"] == SEEDS[0]]
        line(right, f"Avg, M = {m}", colour, points)
        for row in where(rows, merge="rda", num_learners=m)[:1]:
            right.axhline(row["eval_loss"], color=colour, linewidth=1.0, linestyle=":")
    label(right, "outer lr of Avg", f"seed {SEEDS[0]}; dotted: RDA at {OUTER_LR}")
    legend(right)
    return figure


def page(rows: list[Row], claims: list[Claim]) -> str:
    head = ["M", "RDA", "Avg", "against RDA", *(f"Avg, lr {lr:g}" for lr in GRID), "best Avg against RDA"]
    body = []
    for m in NUMS_LEARNERS:
        rda = where(rows, merge="rda", num_learners=m)
        avg = where(rows, merge="avg", num_learners=m, outer_lr=OUTER_LR)
        tried = [where(rows, merge="avg", num_learners=m, outer_lr=lr) for lr in GRID]
        best = best_lr(rows, m)
        tuned = paired(where(rows, merge="avg", num_learners=m, outer_lr=best), rda)
        body.append([
            m, losses(rda), losses(avg), change(paired(avg, rda)),
            *(losses(cells[:1]) for cells in tried), f"lr {best}: {change(tuned)}",
        ])  # fmt: skip
    return write_page(
        "merge", "Merging: plain average or radial-directional",
        question=QUESTION, setup=SETUP, table=markdown(head, body), meaning=MEANING, limits=LIMITS, claims=claims,
    )  # fmt: skip


STUDY = Study(name="merge", plan=plan, claims=claims, picture=picture, page=page)
