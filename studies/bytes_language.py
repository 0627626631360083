"""How few bytes does a language model need? (DCT-decoupled momentum, arXiv 2510.03371, and its family)"""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from studies.bytes import CHUNK, COLOURS, Variant, all_done, both_ways, buffer, every_setting, mb, outer
from studies.harness import SEEDS, Cell, Claim, Row, Study, mean, paired
from studies.pages import BLUE, MUTED, SKY, change, label, legend, losses, markdown, panels
from studies.pages import page as write_page

NUM_LEARNERS, STEPS = 4, 3072
TUNED_ON = SEEDS[0]
OTHER_SIZES = (2, 8)
NUM_BEST = 4
H, K = 32, 224  # of the sparse methods: 96 rounds, of which each sends 5.5 % of the elements


MUON = {"task": "text_muon"}
DILOCO = [
    Variant(method="diloco", H=steps, settings=outer((0.7, 0.5), (0.7, 0.7), (0.7, 0.9)))
    for steps in (8, 32, 128)
]
DILOCO_MUON = [
    Variant(method="diloco", name="diloco, Muon", H=steps, settings=DILOCO[0].settings, more=MUON)
    for steps in (32, 128)
]
COMPRESSED = [
    Variant(
        method="dct_momentum", H=H, codec=f"dct-top{K}-int8-12bit", k=K,
        settings=buffer((0.7, 0.95), (0.7, 0.8), (0.7, 0.5), (0.35, 0.9)),
    ),
    Variant(
        method="dct_momentum_shared", H=H, codec=f"dct-top{K}-int8-12bit", k=K,
        settings=outer((0.5, 0.8), (0.7, 0.5), (0.7, 0.7), (1.0, 0.5), (1.0, 0.7)),
    ),
    Variant(
        method="sparseloco", H=H, codec=f"top{K}-2bit-12bit", k=K,
        settings=buffer((0.4, 0.95), (0.7, 0.95), (1.0, 0.95), (1.0, 1.0), (1.5, 1.0)),
    ),
    Variant(
        method="muloco", H=H, codec="2bit", more=MUON,
        settings=outer((0.7, 0.5), (0.7, 0.7), (0.7, 0.9), (1.0, 0.5)),
    ),
    Variant(
        method="random_rows", H=H, codec="rows256-bf16", k=256,
        settings=buffer((0.4, 0.95), (0.7, 0.95), (1.0, 0.95), (1.0, 1.0), (0.2, 0.95)),
    ),
    Variant(
        method="demo", H=1, codec="dct-top32-fp32-12bit", k=32,
        settings=buffer((3e-4, 0.999), (1e-3, 0.999), (2e-3, 0.999), (1e-3, 0.95), (4e-3, 0.999)),
    ),
]  # fmt: skip
VARIANTS = [*DILOCO, *DILOCO_MUON, *COMPRESSED]


def _point(
    up: str, down: str, k: int = CHUNK, inner: str = "Muon", steps: int = H, feedback: bool = True
) -> Variant:
    """Both directions compressed, with the outer step that is best for DiLoCo with AdamW."""
    return Variant(
        method="muloco" if feedback else "diloco", H=steps, codec=up, downlink=down, k=k,
        name=f"{inner}: {up} / {down}{'' if feedback else ', no feedback up'}",
        settings=outer((0.7, 0.7)), more=MUON if inner == "Muon" else {},
    )  # fmt: skip


POINTS = [
    *(
        _point(up, down, k, inner)
        for inner in ("Muon", "AdamW")
        for up, down, k in (
            ("2bit", "2bit", CHUNK), ("1bit", "2bit", CHUNK), ("1bit", "1bit", CHUNK),
            ("top1024-2bit-gaps", "2bit", 1024), ("top512-2bit-gaps", "top1024-2bit-gaps", 512),
            ("top224-2bit-gaps", "top512-2bit-gaps", 224),
        )
    ),
    *(_point("1bit", "1bit", inner=inner, steps=128) for inner in ("Muon", "AdamW")),
    *(_point(up, "int4", inner="Muon") for up in ("2bit", "int4")),
    _point("int4", "int4", inner="AdamW"),
    *(_point(up, "int4", inner="AdamW", feedback=False) for up in ("1bit", "2bit", "int4")),
]  # fmt: skip
"""Where the least bytes are looked for."""
ALLOWED = 0.005  # so much worse than DiLoCo with equal rounds and the same inner optimizer


def plan(rows: list[Row]) -> list[Cell]:
    """Every setting at one seed; the best of each at three; the best four, and diloco, with 2 and 8 learners."""
    tried = every_setting(VARIANTS, TUNED_ON, NUM_LEARNERS, STEPS)
    if not all_done(tried, rows):
        return tried
    seeds = [
        variant.cell(seed, NUM_LEARNERS, STEPS, variant.best(rows, TUNED_ON, NUM_LEARNERS))
        for variant in VARIANTS
        for seed in SEEDS[1:]
    ]
    if not all_done(seeds, rows):
        return tried + seeds
    sizes = [
        variant.cell(TUNED_ON, num_learners, STEPS, variant.best(rows, TUNED_ON, NUM_LEARNERS))
        for num_learners in OTHER_SIZES
        for variant in [DILOCO[1], *leaders(rows)]
    ]
    points = [point.cell(TUNED_ON, NUM_LEARNERS, STEPS, 0) for point in POINTS]
    if not all_done(points, rows):
        return tried + seeds + sizes + points
    more = [point.cell(seed, NUM_LEARNERS, STEPS, 0) for point, _ in finalists(rows) for seed in SEEDS[1:]]
    return tried + seeds + sizes + points + more


def leaders(rows: list[Row]) -> list[Variant]:
    """The compressed methods with the lowest losses."""
    return sorted(COMPRESSED, key=lambda v: mean(of(rows, v), "eval_loss"))[:NUM_BEST]


def finalists(rows: list[Row]) -> list[tuple[Variant, Variant]]:
    """Points with the least bytes, each with what it is compared with: plain DiLoCo, and the same inner optimizer.

    Of those within twice `ALLOWED` at the seed of all.
    """
    once = [r for r in rows if r["seed"] == TUNED_ON]
    found = []
    for more in (None, {}, MUON):
        pairs = [(p, reference_of(p, more)) for p in POINTS if more is None or p.more == more]
        near = [(p, ref) for p, ref in pairs if fmean(against(once, p, ref)) <= 2 * ALLOWED]
        found += sorted(near, key=lambda pair: both_ways(pair[0].rows(once)))[:1]
    return found


def reference_of(point: Variant, more: Mapping[str, Any] | None = None) -> Variant:
    """DiLoCo with equal rounds and the inner optimizer that ``more`` says; None: plain, AdamW."""
    return next(v for v in [*DILOCO, *DILOCO_MUON] if v.H == point.H and v.more == (more or {}))


def against(rows: list[Row], point: Variant, reference: Variant) -> list[float]:
    """Relative differences in loss at equal seeds."""
    return paired(point.rows(rows), of(rows, reference))


def of(rows: list[Row], variant: Variant, num_learners: int = NUM_LEARNERS) -> list[Row]:
    """Its rows with the best setting."""
    return variant.rows(rows, M=num_learners, setting=variant.best(rows, TUNED_ON, NUM_LEARNERS))


def claims(rows: list[Row]) -> list[Claim]:
    small, middle, large = (of(rows, variant) for variant in DILOCO)
    authors, shared = (of(rows, v) for v in COMPRESSED[:2])
    sent = [mb(middle) / mb(found) for found in (authors, shared)]
    made = [
        Claim(
            claim="dct_momentum sends 16 times less than DiLoCo with as many rounds, all partners counted",
            figure=f"{sent[0]:.1f} times; with a hub, dct_momentum_shared, {sent[1]:.1f} times",
            holds=sent[0] >= 16,
        ),
        _between("dct_momentum's average", authors, "eval_loss", middle, large),
        _between("dct_momentum's learners", authors, "workers_loss", middle, large),
        _between("dct_momentum_shared", shared, "eval_loss", middle, large),
        Claim(
            claim="more local steps cost DiLoCo loss (H = 128 against 8)",
            figure=change(paired(large, small)), holds=fmean(paired(large, small)) > 0,
        ),
        Claim(
            claim="coefficients by size beat rows by chance at about equal bytes (sparseloco, random_rows)",
            figure=change(paired(of(rows, COMPRESSED[2]), of(rows, COMPRESSED[4]))),
            holds=fmean(paired(of(rows, COMPRESSED[2]), of(rows, COMPRESSED[4]))) < 0,
        ),
    ]  # fmt: skip
    for point, reference in finalists(rows):
        loss = against(rows, point, reference)
        less = both_ways(of(rows, reference)) / both_ways(point.rows(rows))
        made.append(
            Claim(
                claim=f"{point.label}, H = {point.H}, is within 0.5 % of {reference.label} with equal rounds",
                figure=f"{change(loss, 2)} at {less:.0f} times fewer bytes, both ways",
                holds=fmean(loss) <= ALLOWED,
            )
        )
    return made


def _between(what: str, found: list[Row], figure: str, low: list[Row], high: list[Row]) -> Claim:
    """The paper: perplexity between those of DiLoCo at H = 128 and 512, 32 and 128 here."""
    value, bounds = mean(found, figure), (mean(low, "eval_loss"), mean(high, "eval_loss"))
    return Claim(
        claim=f"{what}: loss between DiLoCo's at H = 32 and at H = 128",
        figure=f"{value:.3f}, between {bounds[0]:.3f} and {bounds[1]:.3f}",
        holds=value <= bounds[1],
    )


def picture(rows: list[Row]) -> Figure:
    figure, (left, right) = panels(2)
    for variant in VARIANTS:
        found = of(rows, variant)
        colour = COLOURS[variant.label]
        text = variant.label + (f", H = {variant.H}" if variant.method == "diloco" else "")
        if fmean(r["eval_loss"] for r in found) > HIGHEST:
            found = [{**r, "eval_loss": r.get("workers_loss", r["eval_loss"])} for r in found]
            text += " (learners)" if variant.method == "dct_momentum" else ""
        left.plot([mb(found)], [mean(found, "eval_loss")], "o", color=colour, markersize=6)
        left.annotate(
            text,
            (mb(found), mean(found, "eval_loss")),
            (5, -11 if variant.label in LOW else 5),
            textcoords="offset points",
            fontsize=7,
        )
    left.set_ylim(top=HIGHEST)
    for inner, more, colour in (("Muon", MUON, SKY), ("AdamW", {}, BLUE)):
        points = [p for p in POINTS if p.more == more]
        xs = [both_ways(p.rows(rows)) for p in points]
        ys = [100 * fmean(against(rows, p, reference_of(p))) for p in points]
        right.plot(xs, ys, "o", color=colour, label=inner)
    right.axhline(100 * ALLOWED, color=MUTED, linewidth=1.0)
    right.yaxis.set_major_formatter(lambda y, _: f"{y:+g} %")
    for ax, what, ticks in (
        (left, "MB sent by a learner", (0.3, 1, 3, 10, 30)),
        (right, "MB of a learner, up and down", (0.5, 1, 2, 4)),
    ):
        ax.set_xscale("log")
        ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
        ax.minorticks_off()
        label(
            ax, what, "held-out loss, nats" if ax is left else "loss against plain DiLoCo with equal rounds"
        )
    left.set_xlim(right=400)
    legend(right)
    return figure


HIGHEST = 2.8  # of the picture
LOW = ("dct_momentum_shared", "muloco", "diloco, Muon")  # names that stand below their point


def page(rows: list[Row], claims: list[Claim]) -> str:
    head = [
        "method",
        "H",
        "k of 4096",
        "rounds x density",
        "loss",
        "of learners",
        "MB up",
        "MB down",
        "outer",
    ]
    body = [_line(rows, variant) for variant in VARIANTS]
    sizes = [
        [
            variant.label,
            *(f"{mean(of(rows, variant, M), 'eval_loss'):.3f}" for M in (2, 4, 8)),
            *(f"{mb(of(rows, variant, M)):.2f}" for M in (2, 4, 8)),
        ]
        for variant in [DILOCO[1], *leaders(rows)]
    ]
    second = markdown(
        ["method", *(f"loss, M = {M}" for M in (2, 4, 8)), *(f"MB up, M = {M}" for M in (2, 4, 8))], sizes
    )
    points = [
        [
            point.label, point.H, f"{point.rounds_x_density(STEPS):g}", losses(point.rows(rows)),
            change(against(rows, point, reference_of(point))),
            change(against(rows, point, reference_of(point, point.more))), f"{both_ways(point.rows(rows)):.2f}",
        ]
        for point in POINTS
    ]  # fmt: skip
    third = markdown(
        [
            "uplink / downlink",
            "H",
            "rounds x density",
            "loss",
            "against DiLoCo",
            "with its optimizer",
            "MB both ways",
        ],
        points,
    )
    return write_page(
        STUDY.name, "Bytes of a language model", question=QUESTION, setup=SETUP,
        table="\n\n".join([markdown(head, body), second, third]), meaning=MEANING, limits=LIMITS, claims=claims,
    )  # fmt: skip


def _line(rows: list[Row], variant: Variant) -> list[object]:
    found = of(rows, variant)
    setting = variant.settings[found[0]["parameters"]["setting"]]
    text = ", ".join(f"{_SHORT[name]} {value:g}" for name, value in setting.items() if name in _SHORT)
    alone = f"{mean(found, 'workers_loss'):.3f}" if "workers_loss" in found[0] else ""
    travelled = f"{variant.rounds_x_density(STEPS):g}"
    return [
        variant.label, variant.H, variant.k, travelled, losses(found), alone, f"{mb(found):.2f}",
        f"{mb(found, 'bytes_down'):.2f}", text,
    ]  # fmt: skip


_SHORT = {"outer_lr": "lr", "outer_momentum": "momentum", "buffer_decay": "decay"}

QUESTION = """DCT-decoupled momentum promises 16 times fewer bytes than DiLoCo at a perplexity between DiLoCo's
at H = 128 and at H = 512. What do it and its relatives cost and reach, and which point is the cheapest?"""

SETUP = f"""{NUM_LEARNERS} equal learners, scale micro, {STEPS} steps a learner of 4 windows, inner lr 4e-3, equal
tokens. H = 8, 32, 128 stand for 30, 128, 512. Every setting of the outer step (3 to 5 a method) at one seed,
the best at three, paired by weights and data order; the best four and DiLoCo also with 2 and 8 learners at one
seed. Bytes are bodies of transfers without frames, first upload and hand-in of 0.2 MB included. Then, with both
directions compressed (`muloco`, error feedback at the learners and at the hub), the points of the third table."""

LIMITS = """Models of thirty-five thousand parameters; a schedule of 3072 steps; inner learning rates other than
4e-3; rounds x density above 6 for the sparse methods, which their papers reach by thousands of rounds. Differences
of half a percent are as large as what rounding makes of a run."""

MEANING = """With one shared model the promise holds: DCT coefficients with feedback and a common Nesterov step
(`dct_momentum_shared`) send 26 times less than DiLoCo and end between its H = 32 and 128. By the authors' rule it
does not, here: learners keep points of their own, end 2 to 4 % behind DiLoCo at H = 128, and their average is no
model, because each drifts along what it has not sent (study `bytes_learners`). A payload to every partner turns
29 times less into 8. Size matters more than the transform: the largest elements (sparseloco) are far better
than rows by chance; without outer momentum they are 11 % behind DiLoCo. DeMo synchronises 3072 times and is no
better than DiLoCo at H = 128, which sends less.

The cheapest point is not a sparse one. Muon inside makes DiLoCo 8 % better and its drifts easy to compress: 1 bit
up and down, with feedback at both ends, is 5 % better than plain DiLoCo in 24 times fewer bytes, all counted.
Against DiLoCo with Muon nothing within 0.5 % was found: 4 bits both ways cost 1.2 %, 2 bits 2.2 %, 1 bit 3.8 %.
With AdamW, feedback of coarse values harms (2 bits: +8 %), and leaving it out costs nothing that these seeds can
tell from noise: what feedback returns is late, and Nesterov multiplies it."""

STUDY = Study(name="bytes_language", plan=plan, claims=claims, picture=picture, page=page)
