"""With many local steps a round: is gossip as good as an all-reduce? (GASLoC, arXiv 2606.11081)"""

from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from studies.harness import INNER_LR, SEEDS, Cell, Claim, Row, Study, base_recipe, mean, paired, where
from studies.pages import AMBER, BLUE, GREEN, RED, change, label, legend, line, losses, markdown, panels
from studies.pages import page as write_page

NUM_LEARNERS, STEPS = 4, 2000
ROUND_STEPS = [10, 30, 100]
ETA = 0.7
METHODS: dict[str, list[dict[str, Any]]] = {
    "diloco": [{"outer_momentum": m} for m in (0.5, 0.7, 0.9)],
    "gasloc V1": [
        {"momentum_on": "local", "outer_momentum": gamma, "mixing": alpha}
        for gamma, alpha in ((0.5, 0.75), (0.7, 0.6))
    ],
    "gasloc V2": [
        {"momentum_on": "mixed", "outer_momentum": gamma, "mixing": alpha}
        for gamma, alpha in ((0.5, 0.75), (0.7, 0.6), (0.8, 0.6))
    ],
    "noloco": [{"outer_momentum": m} for m in (0.3, 0.5)],
}
"""Settings tried for each; the outer lr is 0.7. On four learners all are inside the stable region."""
COLOURS = dict(zip(METHODS, (BLUE, AMBER, GREEN, RED), strict=True))
EQUAL = 0.5  # the momentum at which all have eta / (1 - gamma) = 1.4
TUNED_ON = SEEDS[0]

QUESTION = """GASLoC replaces the all-reduce of DiLoCo by one meeting with one partner a round. Its paper says
that this is competitive with DiLoCo at several local steps, which earlier decentralised methods are not. Is it
so, at equal eta / (1 - gamma) and with each method at its best, and what does it cost in bytes?"""

SETUP = f"""Four equal learners, scale micro, {STEPS} steps a learner of 4 windows, inner AdamW at {INNER_LR:g},
outer lr {ETA}. Gossip on random pairs, fp32, V1 the paper's momentum, V2 momentum on mixed points. Every setting
at one seed; then the one at momentum {EQUAL} and the best one of each method at three seeds, paired by weights
and data order. Loss of the (consensus) average on 1920 held-out windows."""

LIMITS = """Models of thirty thousand parameters and 20 to 200 rounds; four learners, where a random partner is
one of three. Inner learning rates other than 4e-3."""


def plan(rows: list[Row]) -> list[Cell]:
    """All settings at one seed; then, at the others, those that the comparison needs."""
    tried = [
        _cell(method, setting, H, TUNED_ON)
        for H in ROUND_STEPS
        for method, settings in METHODS.items()
        for setting in settings
    ]
    keys = {cell.key for cell in tried}
    done = [r for r in rows if _key(r) in keys]
    if len(done) < len(tried):
        return tried
    more = [
        _cell(method, setting, H, seed)
        for H in ROUND_STEPS
        for method in METHODS
        for setting in _chosen(done, method, H)
        for seed in SEEDS[1:]
    ]
    return tried + more


def _key(row: Row) -> str:
    return Cell(parameters={}, recipe=row["recipe"]).key


def _cell(method: str, setting: dict[str, Any], H: int, seed: int) -> Cell:
    gossip = {} if method == "diloco" else {"codec": "fp32", "gathers": 0}
    policy = {"sync_every_steps": H, "outer_lr": ETA, **gossip, **setting}
    recipe = base_recipe(
        seed, method=method.split()[0], num_learners=NUM_LEARNERS, steps=STEPS, policy=policy, evals=1,
    )  # fmt: skip
    return Cell(parameters={"method": method, "H": H, "momentum": setting["outer_momentum"]}, recipe=recipe)


def best(rows: list[Row], method: str, H: int) -> float:
    """The momentum with the lowest loss at the seed that was tuned on."""
    tried = [r for r in where(rows, method=method, H=H) if r["seed"] == TUNED_ON]
    return float(min(tried, key=lambda r: r["eval_loss"])["parameters"]["momentum"])


def _chosen(rows: list[Row], method: str, H: int) -> list[dict[str, Any]]:
    wanted = {EQUAL, best(rows, method, H)}
    return [s for s in METHODS[method] if s["outer_momentum"] in wanted]


def of(rows: list[Row], method: str, H: int, momentum: float | None = None) -> list[Row]:
    return where(rows, method=method, H=H, momentum=best(rows, method, H) if momentum is None else momentum)


def claims(rows: list[Row]) -> list[Claim]:
    made = []
    for variant in ("gasloc V1", "gasloc V2"):
        equal = [
            d for H in ROUND_STEPS for d in paired(of(rows, variant, H, EQUAL), of(rows, "diloco", H, EQUAL))
        ]
        tuned = [d for H in ROUND_STEPS for d in paired(of(rows, variant, H), of(rows, "diloco", H))]
        made += [
            Claim(
                claim=f"{variant} is within 1 % of diloco at equal eta / (1 - gamma), over all H",
                figure=change(equal), holds=fmean(equal) < 0.01,
            ),
            Claim(
                claim=f"{variant} is within 1 % of diloco, each at its best", figure=change(tuned),
                holds=fmean(tuned) < 0.01,
            ),
        ]  # fmt: skip
    against = [d for H in ROUND_STEPS for d in paired(of(rows, "noloco", H), of(rows, "diloco", H))]
    made.append(
        Claim(
            claim="noloco, an earlier method, is not (more than 1 % worse), each at its best",
            figure=change(against),
            holds=fmean(against) > 0.01,
        )
    )
    sent = [
        mean(of(rows, "gasloc V2", H), "bytes_up") / mean(of(rows, "diloco", H), "bytes_up")
        for H in ROUND_STEPS
    ]
    made.append(
        Claim(
            claim="a learner sends no more bytes than to a hub (the same vector, to a partner)",
            figure=f"{min(sent):.2f} to {max(sent):.2f} of diloco's",
            holds=max(sent) < 1.05,
        )
    )
    return made


def picture(rows: list[Row]) -> Figure:
    figure, (left, right) = panels(2)
    for method, colour in COLOURS.items():
        line(left, method, colour, [(H, [r["eval_loss"] for r in of(rows, method, H)]) for H in ROUND_STEPS])
        points = [
            (mean(of(rows, method, H), "bytes_up") / 1e6, [r["eval_loss"] for r in of(rows, method, H)])
            for H in ROUND_STEPS
        ]
        line(right, method, colour, points)
    for ax, what in ((left, "local steps a round, H"), (right, "MB sent, all learners")):
        ax.set_xscale("log")
        ax.minorticks_off()
        label(ax, what, "held-out loss, nats; each at its best")
    left.set_xticks(ROUND_STEPS, [str(H) for H in ROUND_STEPS])
    legend(left)
    return figure


def page(rows: list[Row], claims: list[Claim]) -> str:
    head = [
        "method",
        *(f"H = {H}, {what}" for H in ROUND_STEPS for what in ("momentum .5", "best", "(momentum)")),
    ]
    body = []
    for method in METHODS:
        body.append([method])
        for H in ROUND_STEPS:
            body[-1] += [
                losses(of(rows, method, H, EQUAL)), losses(of(rows, method, H)), f"{best(rows, method, H):g}",
            ]  # fmt: skip
    apart = [
        [
            "consensus distance",
            *(f"{mean(of(rows, 'gasloc V2', H), 'consensus_distance'):.2g}" for H in ROUND_STEPS),
        ],
        [
            "loss of a learner alone against the average",
            *(change(_alone(of(rows, "gasloc V2", H))) for H in ROUND_STEPS),
        ],
    ]
    second = markdown(["gasloc V2 at its best", *(f"H = {H}" for H in ROUND_STEPS)], apart)
    return write_page(
        STUDY.name, "Gossip with many local steps", question=QUESTION, setup=SETUP,
        table=markdown(head, body) + "\n\n" + second, meaning=MEANING, limits=LIMITS, claims=claims,
    )  # fmt: skip


def _alone(rows: list[Row]) -> list[float]:
    return [r["workers_loss"] / r["eval_loss"] - 1 for r in rows]


MEANING = """Competitive, yes, and closer the longer the rounds: at equal momentum V2 is 2.3 % behind DiLoCo at H
= 10, 0.6 % at H = 30 and level at H = 100, where seeds differ by more. So one partner a round costs next to
nothing once a round is long, because drifts of a hundred steps on one kind of data hardly differ between
learners. V1 and V2 are alike with many local steps; at one step a round they are not (study `gossip_one_step`).
NoLoCo, whose pull to the partner is its gradient step too, stays 2 to 4 % behind. A learner alone is half a
percent worse than the average, so whoever needs a model in the middle of a run can take any. A learner sends
what it would send to a hub, and no hub needs the bandwidth of all."""

STUDY = Study(name="gossip_local_steps", plan=plan, claims=claims, picture=picture, page=page)
