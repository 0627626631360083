"""Does quality fall with the number of learners, and why? (DCT-decoupled momentum, arXiv 2510.03371)"""

from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from studies.bytes import CHUNK, Variant, both_ways
from studies.harness import SEEDS, Cell, Claim, Row, Study, mean, paired
from studies.pages import COLOURS as PALETTE
from studies.pages import INK, change, label, legend, line, markdown, panels
from studies.pages import page as write_page

SIZES = (2, 4, 8, 16)
STEPS, H, K = 2560, 32, 256  # 80 rounds, of which each sends a sixteenth of the elements
ETA, BETA = 0.7, 0.5  # the best of those tried in `bytes_language`


def _authors(name: str, k: int = K, **more: Any) -> Variant:
    """`dct_momentum`, with a difference."""
    codec = "dct-all-int8" if k == CHUNK else f"dct-top{k}-int8-12bit"
    setting = {"outer_lr": ETA, "buffer_decay": BETA, "outer_momentum": 0.0, **more}
    return Variant(method="dct_momentum", name=name, H=H, codec=codec, k=k, settings=[setting])


DILOCO = Variant(method="diloco", H=H, settings=[{"outer_lr": 0.7, "outer_momentum": 0.7}])
WORLD = _authors("world")
CONTRIBUTORS = _authors("contributors", reduce="contributors")
MORE = _authors("world, 4 times k", 4 * K)
ALL = _authors("world, all coefficients", CHUNK)
DENSE = _authors("world, averaged every 10th round", dense_every_rounds=10)
SHARED = Variant(
    method="dct_momentum_shared", name="one shared model", H=H, codec=f"dct-top{K}-int8-12bit", k=K,
    settings=[{"outer_lr": 1.0, "outer_momentum": 0.5}],
)  # fmt: skip
VARIANTS = [DILOCO, WORLD, CONTRIBUTORS, MORE, ALL, DENSE, SHARED]
COLOURS = dict(zip((v.label for v in VARIANTS), (*PALETTE, INK), strict=True))


def plan(rows: list[Row]) -> list[Cell]:
    """One seed for all; a second one for four of the variants, but for the largest size."""
    first, second = SEEDS[:2]
    repeated = (DILOCO, WORLD, CONTRIBUTORS, SHARED)
    once = [variant.cell(first, M, STEPS, 0) for M in SIZES for variant in VARIANTS]
    return once + [variant.cell(second, M, STEPS, 0) for M in SIZES[:-1] for variant in repeated]


def of(rows: list[Row], variant: Variant, num_learners: int) -> list[Row]:
    return variant.rows(rows, M=num_learners)


def behind(rows: list[Row], variant: Variant, num_learners: int, figure: str = "eval_loss") -> list[float]:
    """Relative differences to DiLoCo with as many learners, at equal seeds."""
    reference = {r["seed"]: r["eval_loss"] for r in of(rows, DILOCO, num_learners)}
    return [r[figure] / reference[r["seed"]] - 1 for r in of(rows, variant, num_learners)]


def spread(rows: list[Row], variant: Variant, num_learners: int) -> float:
    """Root mean square distance of the learners from their average, at the end."""
    found = of(rows, variant, num_learners)
    return float(fmean(r["consensus_distance"] for r in found) ** 0.5)


def claims(rows: list[Row]) -> list[Claim]:
    few, many = (behind(rows, WORLD, M, "workers_loss") for M in (2, 16))
    return [
        Claim(
            claim="with more learners dct_momentum falls further behind DiLoCo (its learners, M = 16 against 2)",
            figure=f"{change(few)} with 2, {change(many)} with 16", holds=fmean(many) > fmean(few),
        ),
        Claim(
            claim="the average of its learners is no model with many of them (worse than a learner alone, M = 16)",
            figure=change(_average_against_learner(rows, WORLD, 16)),
            holds=fmean(_average_against_learner(rows, WORLD, 16)) > 0,
        ),
        Claim(
            claim="the contributors' mean is worse than the world's (average, M = 8)",
            figure=change(paired(of(rows, CONTRIBUTORS, 8), of(rows, WORLD, 8))),
            holds=fmean(paired(of(rows, CONTRIBUTORS, 8), of(rows, WORLD, 8))) > 0.005,
        ),
        Claim(
            claim="sending every coefficient repairs it (average within 1 % of DiLoCo, M = 8)",
            figure=change(behind(rows, ALL, 8)), holds=fmean(behind(rows, ALL, 8)) < 0.01,
        ),
        Claim(
            claim="a dense average every 10th round repairs it (within 2 % of DiLoCo at every M)",
            figure=", ".join(f"{100 * fmean(behind(rows, DENSE, M)):+.1f} %" for M in SIZES),
            holds=max(fmean(behind(rows, DENSE, M)) for M in SIZES) < 0.02,
        ),
        Claim(
            claim="one shared model repairs it (within 2 % of DiLoCo at every M)",
            figure=", ".join(f"{100 * fmean(behind(rows, SHARED, M)):+.1f} %" for M in SIZES),
            holds=max(fmean(behind(rows, SHARED, M)) for M in SIZES) < 0.02,
        ),
    ]  # fmt: skip


def _average_against_learner(rows: list[Row], variant: Variant, num_learners: int) -> list[float]:
    return [r["eval_loss"] / r["workers_loss"] - 1 for r in of(rows, variant, num_learners)]


def _of_learners(row: Row) -> float:
    """Mean loss of the learners' own parameters; with one shared model, its loss."""
    return float(row["workers_loss" if "workers_loss" in row else "eval_loss"])


def picture(rows: list[Row]) -> Figure:
    figure, (left, right) = panels(2)
    for variant in VARIANTS:
        colour = COLOURS[variant.label]
        points = [(M, [_of_learners(r) for r in of(rows, variant, M)]) for M in SIZES]
        line(left, variant.label, colour, points)
        if variant.method == "dct_momentum":
            line(right, variant.label, colour, [(M, [spread(rows, variant, M)]) for M in SIZES])
    for ax, what in (
        (left, "held-out loss of the learners, nats"),
        (right, "their distance from the average"),
    ):
        ax.set_xscale("log", base=2)
        ax.set_xticks(SIZES, [str(M) for M in SIZES])
        ax.minorticks_off()
        label(ax, "learners, M", what)
    left.set_ylim(top=2.6)
    legend(left)
    return figure


def page(rows: list[Row], claims: list[Claim]) -> str:
    head = ["", *(f"M = {M}" for M in SIZES)]
    loss, alone, apart, sent = [], [], [], []
    for variant in VARIANTS:
        loss.append([variant.label, *(f"{mean(of(rows, variant, M), 'eval_loss'):.3f}" for M in SIZES)])
        sent.append([variant.label, *(f"{both_ways(of(rows, variant, M)):.2f}" for M in SIZES)])
        if variant.method == "dct_momentum":
            alone.append(
                [variant.label, *(f"{mean(of(rows, variant, M), 'workers_loss'):.3f}" for M in SIZES)]
            )
            apart.append([variant.label, *(f"{spread(rows, variant, M):.1f}" for M in SIZES)])
    parts = [
        ("Loss of the average", loss), ("Loss of the learners, mean", alone),
        ("Distance of the learners from the average (root mean square)", apart),
        ("MB of a learner, up and down", sent),
    ]  # fmt: skip
    table = "\n\n".join(f"{title}:\n\n{markdown(head, body)}" for title, body in parts)
    return write_page(
        STUDY.name, "Bytes and the number of learners", question=QUESTION, setup=SETUP, table=table,
        meaning=MEANING, limits=LIMITS, claims=claims,
    )  # fmt: skip


QUESTION = """The authors of DCT-decoupled momentum say that in some cases quality falls as learners become
more. Where, why, and what repairs it?"""

SETUP = f"""2 to 16 equal learners of scale micro, {STEPS} steps a learner of 4 windows, inner lr 4e-3, so that
all data grow with M; H = {H}, {STEPS // H} rounds. dct_momentum with k = {K} of 4096 (rounds x density = 5), int8,
outer lr {ETA}, decay {BETA}, its partners' mean over all ("world") or over those who sent a coefficient
("contributors"); with four times as many coefficients, with all, and with a dense average every 10th round; and
dct_momentum_shared with the same payload. One seed; a second one for four of them up to M = 8."""

LIMITS = """Equal learners with data of one kind; small models; one setting of the outer step for all M."""

MEANING = """Yes, against DiLoCo: its loss falls as learners and data grow, that of dct_momentum's learners does
not (world) or rises (contributors). Two causes. Each learner steps with a drift of its own, so that points lie
as far apart as training moves them; even with every coefficient on the wire they stay apart, and the average
gets worse with M. And what few send is a mean of few: over the world it is small, so that little of what others
learned arrives; over contributors it is as large as one learner's, which helps two or four learners and makes
momentum that nobody sent with sixteen. Two things repair most of it: to average whole parameters every tenth
round, at half of what sending everything costs, and to share the model, with the same payload, feedback and one
Nesterov step at a hub (`dct_momentum_shared`). Both stay within 5 % of DiLoCo at every M, where two seeds of
one method differ by as much."""

STUDY = Study(name="bytes_learners", plan=plan, claims=claims, picture=picture, page=page)
