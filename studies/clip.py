"""What does clipping to the median norm cost, and what does it save? (Covenant-72B's rule, `clip = "median"`)"""

from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from studies.harness import SEEDS, Cell, Claim, Row, Study, base_recipe, mean, paired, where
from studies.pages import BLUE, MUTED, change, label, losses, markdown, panels
from studies.pages import page as write_page

NUM_LEARNERS = 4
LOCKSTEP = {"pace": "lockstep", "quorum": "all", "num_fragments": 8}
CASES: dict[str, dict[str, Any]] = {
    "equal learners": {"policy": LOCKSTEP},
    "one at half speed": {"policy": {"num_fragments": 8}, "lab": {"step_s": [1.0, 1.0, 1.0, 2.0]}},
    "sparseloco": {
        "method": "sparseloco",
        "policy": {
            "sync_every_steps": 24, "codec": "top224-2bit-12bit", "buffer_decay": 1.0, "outer_lr": 1.0,
            "outer_momentum": 0.0,
        },
    },
    "one climbs": {"policy": LOCKSTEP, "task": "studies.tasks:last_climbs"},
    "one climbs, Avg": {"policy": LOCKSTEP | {"merge": "avg"}, "task": "studies.tasks:last_climbs"},
}  # fmt: skip
HEALTHY = ("equal learners", "one at half speed", "sparseloco")
RULES = {"none": None, "median": "median"}

QUESTION = """`clip = "median"` cuts every contribution that is larger than the median of its merge down to it.
What does that cost learners that are healthy, and how much does it save when one is broken?"""

SETUP = """Four learners; RDA, P = 8, H = 24, tau = 2, lockstep; "half speed" in free pace, K = 1 with grace;
sparseloco with P = 1, 224 of 4096 elements, decay 1, outer lr 1. In "one climbs" the last learner has a sign
error: it ascends its loss. Scale micro, 800 steps a learner of 4 windows, inner lr 4e-3 (why:
`studies/harness.py`); three seeds, paired by weights and data order."""

MEANING = """Where learners send plain outer gradients, clipping costs nothing that these runs can see, although
half of all contributions are cut: four norms lie close together, so little is cut off each. A learner with a
sign error costs 17 % with RDA and 46 % with Avg (one seed of it nearly lost); clipped, 2 %: it climbs ever
further, its contributions grow large, and a quarter of the weight at median length is what three honest ones
outvote. Sparse methods with error feedback are another matter: a learner takes what it sent out of its buffer,
and what the hub cuts off is in neither. So `clip` is for dense methods, and off by default in all."""

LIMITS = """Learners whose numbers are merely large, as after a loss spike; attackers who know the rule; many
learners; telling a sparse learner what was cut, so that its buffer keeps that. Differences of one
percent are as large as what rounding makes of a run."""


def plan(rows: list[Row]) -> list[Cell]:
    return [_cell(case, rule, seed) for seed in SEEDS for case in CASES for rule in RULES]


def _cell(case: str, rule: str, seed: int) -> Cell:
    options = {name: value for name, value in CASES[case].items() if name != "policy"}
    clip = {} if RULES[rule] is None else {"clip": RULES[rule]}
    recipe = base_recipe(seed, num_learners=NUM_LEARNERS, policy=CASES[case]["policy"] | clip, **options)
    return Cell(parameters={"case": case, "clip": rule}, recipe=recipe)


def worse(rows: list[Row], case: str) -> list[float]:
    return paired(where(rows, case=case, clip="median"), where(rows, case=case, clip="none"))


def claims(rows: list[Row]) -> list[Claim]:
    return [
        *(
            Claim(
                claim=f"{case}: costs at most 1 %",
                figure=change(worse(rows, case)), holds=fmean(worse(rows, case)) <= 0.01,
            )
            for case in HEALTHY
        ),
        *(
            Claim(
                claim=f"{case}: halves what the broken learner costs",
                figure=f"{harm(rows, case, 'none'):+.1f} % to {harm(rows, case, 'median'):+.1f} %",
                holds=harm(rows, case, "median") <= harm(rows, case, "none") / 2,
            )
            for case in CASES
            if case not in HEALTHY
        ),
    ]  # fmt: skip


def harm(rows: list[Row], case: str, rule: str) -> float:
    """Percent of loss above that of four healthy learners that are not clipped."""
    healthy = where(rows, case="equal learners", clip="none")
    return 100 * fmean(paired(where(rows, case=case, clip=rule), healthy))


def cut(rows: list[Row], case: str) -> float:
    """Percent of contributions that were cut down."""
    return 100 * mean(where(rows, case=case, clip="median"), "clipped_share")


def picture(rows: list[Row]) -> Figure:
    """Loss of every cell, case by case."""
    figure, (ax,) = panels(1, width=6.4, height=2.8)
    for rule, colour, shift in (("none", MUTED, -0.12), ("median", BLUE, 0.12)):
        for at, case in enumerate(CASES):
            found = [row["eval_loss"] for row in where(rows, case=case, clip=rule)]
            ax.plot([at + shift] * len(found), found, "o", color=colour, markersize=5, alpha=0.8)
            if not at:
                ax.plot([], [], "o", color=colour, markersize=5, label=f"clip: {rule}")
    ax.set_xticks(range(len(CASES)), list(CASES))
    ax.tick_params(axis="x", labelsize=8)
    ax.margins(y=0.2)
    ax.legend(frameon=False, fontsize=8.5)
    label(ax, "", "held-out loss")
    return figure


def page(rows: list[Row], claims: list[Claim]) -> str:
    head = ["case", "loss", "with clip", "against none", "cut, of all contributions"]
    body = [
        [
            case, losses(where(rows, case=case, clip="none")), losses(where(rows, case=case, clip="median")),
            change(worse(rows, case)), f"{cut(rows, case):.0f} %",
        ]
        for case in CASES
    ]  # fmt: skip
    return write_page(
        "clip", "Clipping to the median norm",
        question=QUESTION, setup=SETUP, table=markdown(head, body), meaning=MEANING, limits=LIMITS, claims=claims,
    )  # fmt: skip


STUDY = Study(name="clip", plan=plan, claims=claims, picture=picture, page=page)
