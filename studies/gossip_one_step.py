"""One step a round: which decentralised method is best? Does GASLoC lead? (arXiv 2606.11081)"""

from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from studies.harness import SEEDS, Cell, Claim, Row, Study, base_recipe, mean, paired, where
from studies.pages import COLOURS, INK, MUTED, change, label, losses, markdown, panels
from studies.pages import page as write_page

NUM_LEARNERS, STEPS = 8, 400
RATES = [4e-3, 8e-3, 16e-3, 32e-3]
INNER = {"beta1 = 0.9": "text", "beta1 = 0": "studies.tasks:without_inner_momentum"}
TUNED_ON, TUNED_AT = SEEDS[0], ["ring", "random"]
MATCHINGS = ["ring", "exponential", "random", "complete"]
LARGER, LARGER_AT = 16, ["ring", "random"]

VARIANTS: dict[str, tuple[str, dict[str, Any], float]] = {
    "gasloc V1": (
        "gasloc",
        {"momentum_on": "local", "outer_lr": 0.7, "outer_momentum": 0.5, "mixing": 0.75},
        0.7 / (1 - 0.5),
    ),
    "gasloc V2": (
        "gasloc",
        {"momentum_on": "mixed", "outer_lr": 0.7, "outer_momentum": 0.7, "mixing": 0.6},
        0.7 / (1 - 0.7),
    ),
    "d_adamw": ("d_adamw", {}, 1.0),
    "qg_dsgdm": ("qg_dsgdm", {"outer_momentum": 0.9}, 1 / (1 - 0.9)),
    "decentlam": ("decentlam", {"outer_momentum": 0.5}, 1 / (1 - 0.5)),
    "noloco": ("noloco", {"outer_lr": 0.7, "outer_momentum": 0.5}, 0.7 / (1 - 0.5)),
    "ad_psgd": ("ad_psgd", {}, 1.0),
}
"""Method, its settings, and by how much its momentum multiplies a step that is repeated for ever."""
GASLOC = ["gasloc V1", "gasloc V2"]
OTHERS = [name for name in VARIANTS if name not in GASLOC]

QUESTION = """With one local step a round GASLoC is to beat the state of the art in decentralised training on
several topologies. Does it, on a small language model and with AdamW inside?"""

SETUP = f"""{NUM_LEARNERS} equal learners, scale micro, {STEPS} steps a learner of 4 windows, one step a round,
fp32. The grid is in the *effective* rate, inner lr times what the method's momentum multiplies it by: {RATES}.
It was run on a ring and on random pairs at one seed, with AdamW's own momentum (beta1 = 0.9) and without it
(beta1 = 0), since all of these methods but two bring one of their own. Each method's best of these was then run
on four topologies with three seeds, paired by weights and data order, and with {LARGER} learners at one seed. V1
and V2: momentum on the local and on the mixed points. Loss of the consensus average on 1920 held-out windows."""

LIMITS = """Models of thirty thousand parameters and 400 steps; momenta other than each method's usual one;
whether the order of the methods holds where data differ between learners more than parts of one author's plays
do."""

MEANING = """Where momentum sits decides. With AdamW's own (beta1 = 0.9) under it, every method that brings a
momentum is worse than plain D-AdamW, on the complete graph too: two momenta in series, not the gossip. Without
it the three that let momentum run over mixed points, GASLoC V2, DecentLaM and NoLoCo, end 6 to 8 % below D-AdamW
at its best. Among them GASLoC V2 is ahead on random pairs and the exponential graph by half a percent, which is
within the spread of seeds, and by far on the complete graph, where the two heavy-ball methods, tuned on sparser
ones, do worse; on the ring NoLoCo is half a percent ahead, and with 16 learners the three are level. V1, the
paper's printed form, must keep its momentum at 0.5 to be stable with much mixing, and gains little. So: one step
a round, momentum in the gossip and beta1 = 0 inside; `gasloc` has V2 as its default."""


def plan(rows: list[Row]) -> list[Cell]:
    """The grid; then each method's best setting everywhere."""
    grid = [
        _cell(name, inner, rate, matching, NUM_LEARNERS, TUNED_ON)
        for name in VARIANTS
        for inner in INNER
        for rate in RATES
        for matching in TUNED_AT
    ]
    keys = {cell.key for cell in grid}
    if len({_key(r) for r in rows} & keys) < len(keys):
        return grid
    chosen = {name: best(rows, name) for name in VARIANTS}
    finals = [
        _cell(name, *chosen[name], matching, NUM_LEARNERS, seed)
        for seed in SEEDS
        for name in VARIANTS
        for matching in MATCHINGS
    ]
    larger = [_cell(name, *chosen[name], m, LARGER, TUNED_ON) for name in VARIANTS for m in LARGER_AT]
    rest = [cell for cell in (*finals, *larger) if cell.key not in keys]
    return grid + rest


def _key(row: Row) -> str:
    return Cell(parameters={}, recipe=row["recipe"]).key


def _cell(name: str, inner: str, rate: float, matching: str, n: int, seed: int) -> Cell:
    method, settings, multiplies = VARIANTS[name]
    policy = {"sync_every_steps": 1, "matching": matching, "codec": "fp32", "gathers": 0, **settings}
    recipe = base_recipe(
        seed, method=method, task=INNER[inner], num_learners=n, steps=STEPS, lr=round(rate / multiplies, 9),
    )  # fmt: skip
    return Cell(
        parameters={"method": name, "inner": inner, "rate": rate, "matching": matching, "n": n},
        recipe={**recipe, "policy": policy},
    )


def best(rows: list[Row], name: str, inner: str | None = None) -> tuple[str, float]:
    """(inner, rate) with the lowest loss over the topologies of the grid, at its seed."""
    pairs = [(i, rate) for i in INNER if inner in (None, i) for rate in RATES]
    return min(pairs, key=lambda pair: _tuned(rows, name, *pair))


def _tuned(rows: list[Row], name: str, inner: str, rate: float) -> float:
    found = where(rows, method=name, inner=inner, rate=rate, n=NUM_LEARNERS)
    tuned = [r for r in found if r["seed"] == TUNED_ON and r["parameters"]["matching"] in TUNED_AT]
    return mean(tuned, "eval_loss")


def of(rows: list[Row], name: str, matching: str, n: int = NUM_LEARNERS) -> list[Row]:
    inner, rate = best(rows, name)
    return where(rows, method=name, inner=inner, rate=rate, matching=matching, n=n)


def claims(rows: list[Row]) -> list[Claim]:
    made = []
    for matching in MATCHINGS:
        leader = min(GASLOC, key=lambda name: mean(of(rows, name, matching), "eval_loss"))
        rival = min(OTHERS, key=lambda name: mean(of(rows, name, matching), "eval_loss"))
        ahead = paired(of(rows, leader, matching), of(rows, rival, matching))
        made.append(
            Claim(
                claim=f"GASLoC leads on {matching} ({leader} against {rival}, the best other)",
                figure=change(ahead),
                holds=fmean(ahead) < 0,
            )
        )
    for name in GASLOC:
        with_inner = min(_tuned(rows, name, "beta1 = 0.9", rate) for rate in RATES)
        without = min(_tuned(rows, name, "beta1 = 0", rate) for rate in RATES)
        made.append(
            Claim(
                claim=f"{name} wants AdamW without a momentum of its own (each at its best rate)",
                figure=f"{without:.3f} without, {with_inner:.3f} with",
                holds=without < with_inner,
            )
        )
    return made


def picture(rows: list[Row]) -> Figure:
    figure, (left, right) = panels(2, height=3.4)
    names = sorted(VARIANTS, key=lambda name: mean(of(rows, name, "random"), "eval_loss"), reverse=True)
    for ax, value, title in (
        (left, "eval_loss", "held-out loss, nats, n = 8"),
        (right, "consensus_distance", "consensus distance, n = 8"),
    ):  # fmt: skip
        for matching, colour in zip(MATCHINGS, COLOURS, strict=False):
            for y, name in enumerate(names):
                values = [r[value] for r in of(rows, name, matching)]
                ax.plot(values, [y] * len(values), ".", color=colour, markersize=4, alpha=0.6)
                ax.plot(
                    [fmean(values)], [y], "o", color=colour, markersize=5, label=matching if not y else None
                )
        ax.set_yticks(range(len(names)), names if ax is left else [""] * len(names), color=INK, fontsize=8.5)
        ax.grid(True, axis="x", color="#e5e7eb", linewidth=0.8)
        label(ax, "", title)
    right.set_xscale("log")
    right.set_xticks([0.003, 0.01, 0.03], ["0.003", "0.01", "0.03"])
    right.minorticks_off()
    right.legend(frameon=False, fontsize=8, labelcolor=MUTED, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def page(rows: list[Row], claims: list[Claim]) -> str:
    head = ["method", "inner", "effective rate", *MATCHINGS, *(f"{m}, n = {LARGER}" for m in LARGER_AT)]
    body = []
    for name in sorted(VARIANTS, key=lambda one: mean(of(rows, one, "random"), "eval_loss")):
        inner, rate = best(rows, name)
        body.append(
            [name, inner, f"{rate:g}", *(losses(of(rows, name, m)) for m in MATCHINGS),
             *(losses(of(rows, name, m, LARGER)) for m in LARGER_AT)]
        )  # fmt: skip
    grid_head = ["ring and random, one seed", *(f"{inner}, {rate:g}" for inner in INNER for rate in RATES)]
    grid = [
        [name, *(f"{_tuned(rows, name, inner, rate):.3f}" for inner in INNER for rate in RATES)]
        for name in VARIANTS
    ]
    return write_page(
        STUDY.name, "Gossip at one step a round", question=QUESTION, setup=SETUP,
        table=markdown(head, body) + "\n\n" + markdown(grid_head, grid), meaning=MEANING, limits=LIMITS,
        claims=claims,
    )  # fmt: skip


STUDY = Study(name="gossip_one_step", plan=plan, claims=claims, picture=picture, page=page)
