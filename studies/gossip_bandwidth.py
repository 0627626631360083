"""Links from 10 Gbit/s to 50 Mbit/s: what does each way of training together make of them? (GASLoC, 2606.11081)"""

from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from studies.harness import SEEDS, Cell, Claim, Row, Study, base_recipe, mean, where
from studies.pages import COLOURS, label, legend, losses, markdown, panels, percent
from studies.pages import page as write_page

MBPS = [10_000, 5_000, 2_000, 1_000, 500, 200, 100, 50]
NAMES = [f"learner-{i}" for i in range(len(MBPS))]
STEPS, H, GIGABYTES = 1200, 30, 4
MOMENTUM, MIXING = 0.5, 0.75
PATIENT_S = 3000.0  # longer than any transfer

GOSSIP = {"codec": "fp32", "gathers": 20, "mixing": MIXING, "momentum_on": "mixed", "exchange_s": PATIENT_S}
FITTED = {
    name: max(H, min(8 * H, round(8000 * GIGABYTES / mbps))) for name, mbps in zip(NAMES, MBPS, strict=True)
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "diloco": ("diloco", {}),
    "decoupled": ("decoupled", {"num_fragments": 4, "overlap_steps": 5, "codec": "fp32"}),
    "gasloc": ("gasloc", GOSSIP),
    "gasloc, overlapped": ("gasloc", {**GOSSIP, "overlap_steps": H}),
    "gasloc, deadline 60 s": ("gasloc", {**GOSSIP, "exchange_s": 60.0}),
    "gasloc, by bandwidth": ("gasloc", {**GOSSIP, "matching": "bandwidth"}),
    "gasloc, by bandwidth, H fitted": ("gasloc", {**GOSSIP, "matching": "bandwidth", "local_steps": FITTED}),
}
TARGET = 1.1  # times DiLoCo's loss at the end: the loss whose time is compared

QUESTION = """GASLoC is to be far ahead of DiLoCo where links differ. Is it, how much comes from choosing
partners by bandwidth, and where does decoupled training with a syncer stand?"""

SETUP = f"""Eight learners, a step takes 1 s, links of {", ".join(f"{m:,}" for m in MBPS)} Mbit/s, 50 ms, a model
whose vector is {GIGABYTES} GB on them (trained is the micro model: transfers take as long as if it were so
large). H = {H}, {STEPS} steps a learner on average: all stop at the same number of tokens. Outer lr 0.7,
momentum {MOMENTUM}. DiLoCo goes through a hub with links of its own, which costs a learner what a ring
all-reduce would, within an eighth. Taking a consensus average to evaluate costs gossip no time. Three seeds."""

LIMITS = """Longer runs, in which 20 rounds are no longer few; links that change; a syncer whose own link is the
bottleneck (it has none here); codecs, which help every variant."""

MEANING = """Random pairs do not escape the slowest link: nearly every round somebody waits for it, and all
others in turn, so GASLoC as printed takes more than half of DiLoCo's hours. Overlap hides 30 of up to 640 s. A
deadline shorter than the slow transfers gains time and loses the model: once partners are out of step most
meetings are missed, learners drift apart, and their average is worth little. Partners by bandwidth take a
twelfth of DiLoCo's hours, at the price of fewer meetings: a slow learner has one in eight rounds, the consensus
distance is hundreds of times larger, and the loss is higher at equal tokens. More local steps for slow links
only make that worse. A syncer that waits for nobody is faster than any of them and ends lower than DiLoCo: a
late contribution costs nobody's time, and four fragments are four outer steps for every one of DiLoCo's. GASLoC
is the answer to having no syncer, not to slow links."""


def plan(rows: list[Row]) -> list[Cell]:
    return [_cell(name, seed) for seed in SEEDS for name in VARIANTS]


def _cell(name: str, seed: int) -> Cell:
    method, settings = VARIANTS[name]
    policy = {"sync_every_steps": H, "outer_momentum": MOMENTUM, "lease_s": PATIENT_S, **settings}
    lab = {"latency_s": 0.05, "up_mbps": MBPS, "down_mbps": MBPS, "model_bytes": GIGABYTES * 1e9}
    recipe = base_recipe(
        seed, method=method, num_learners=len(MBPS), steps=STEPS, evals=20, policy=policy, lab=lab
    )  # fmt: skip
    return Cell(parameters={"variant": name}, recipe=recipe)


def of(rows: list[Row], name: str) -> list[Row]:
    return where(rows, variant=name)


def target(rows: list[Row]) -> float:
    """The loss whose time is compared."""
    return TARGET * mean(of(rows, "diloco"), "eval_loss")


def reached_s(row: Row, loss: float) -> float | None:
    """Virtual seconds until a run's loss was first at most this."""
    return next((t for t, _, seen in row["curve"] if seen <= loss), None)


def times(rows: list[Row], name: str, loss: float) -> list[float]:
    return [t for row in of(rows, name) if (t := reached_s(row, loss)) is not None]


def claims(rows: list[Row]) -> list[Claim]:
    goal = target(rows)
    slow = times(rows, "diloco", goal)

    def faster(name: str, claim: str, least: float) -> Claim:
        mine = times(rows, name, goal)
        if len(mine) < len(SEEDS) or len(slow) < len(SEEDS):
            return Claim(claim=claim, figure="one of them does not reach the loss", holds=False)
        ratio = fmean(slow) / fmean(mine)
        return Claim(claim=claim, figure=f"{ratio:.1f} times as fast", holds=ratio >= least)

    final = {name: mean(of(rows, name), "eval_loss") for name in VARIANTS}
    return [
        faster("gasloc", f"GASLoC reaches loss {goal:.2f} twice as fast as DiLoCo (plain random pairs)", 2.0),
        faster(
            "gasloc, by bandwidth", f"with partners by bandwidth it reaches {goal:.2f} twice as fast", 2.0
        ),
        faster("decoupled", f"decoupled reaches {goal:.2f} twice as fast", 2.0),
        Claim(
            claim="at equal tokens GASLoC by bandwidth ends within 1 % of DiLoCo",
            figure=f"{100 * (final['gasloc, by bandwidth'] / final['diloco'] - 1):+.1f} %",
            holds=final["gasloc, by bandwidth"] < 1.01 * final["diloco"],
        ),
        Claim(
            claim="at equal tokens decoupled ends within 1 % of DiLoCo",
            figure=f"{100 * (final['decoupled'] / final['diloco'] - 1):+.1f} %",
            holds=final["decoupled"] < 1.01 * final["diloco"],
        ),
    ]


def picture(rows: list[Row]) -> Figure:
    figure, (left, right) = panels(2, height=3.4)
    for name, colour in zip(VARIANTS, (*COLOURS, "#7c3aed"), strict=True):
        curves = [row["curve"] for row in of(rows, name)]
        for curve in curves:
            left.plot([t / 3600 for t, _, _ in curve[1:]], [x for *_, x in curve[1:]], color=colour, linewidth=0.9,
                      alpha=0.8, label=name if curve is curves[0] else None)  # fmt: skip
            right.plot([n / 1e6 for _, n, _ in curve[1:]], [x for *_, x in curve[1:]], color=colour, linewidth=0.9,
                       alpha=0.8)  # fmt: skip
    label(left, "virtual hours", "held-out loss, nats")
    label(right, "million tokens", "held-out loss, nats")
    left.set_xscale("log")
    left.set_xticks([0.1, 1.0, 10.0], ["0.1", "1", "10"])
    left.minorticks_off()
    legend(left)
    return figure


def page(rows: list[Row], claims: list[Claim]) -> str:
    goal = target(rows)
    head = [
        "variant",
        "hours",
        "goodput",
        f"hours to loss {goal:.2f}",
        "loss at equal tokens",
        "consensus distance",
    ]
    body = []
    for name in VARIANTS:
        cells, reached = of(rows, name), times(rows, name, goal)
        apart = f"{mean(cells, 'consensus_distance'):.2g}" if "consensus_distance" in cells[0] else "-"
        body.append(
            [name, f"{mean(cells, 'virtual_s') / 3600:.2f}", percent(mean(cells, "goodput")),
             f"{fmean(reached) / 3600:.2f}" if len(reached) == len(cells) else "not by all", losses(cells), apart]
        )  # fmt: skip
    return write_page(
        STUDY.name, "Gossip over links of very different speed", question=QUESTION, setup=SETUP,
        table=markdown(head, body), meaning=MEANING, limits=LIMITS, claims=claims,
    )  # fmt: skip


STUDY = Study(name="gossip_bandwidth", plan=plan, claims=claims, picture=picture, page=page)
