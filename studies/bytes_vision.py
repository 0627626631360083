"""How few bytes does an image classifier need? (arXiv 2510.03371 and its family, on a CNN and a ResNet)"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies.bytes import COLOURS, Variant, all_done, buffer, every_setting, mb, outer
from studies.harness import Cell, Claim, Row, Study, mean
from studies.pages import INK, label, losses, markdown, panels, percent
from studies.pages import page as write_page

NUM_LEARNERS, STEPS = 4, 2560
SEEDS = (1, 2)
TUNED_ON = SEEDS[0]
H, K = 32, 256  # of the sparse methods: 80 rounds, of which each sends 6.3 % of the elements
SPARSE = f"top{K}"

CNN: dict[str, Any] = {"task": "vision", "batch_size": 32, "eval_batches": 20}  # all 10 000 held-out images
MUON = CNN | {"task": "vision_muon"}
RESNET = CNN | {"scale": "resnet"}


DILOCO = [
    Variant(method="diloco", H=steps, settings=outer((0.7, 0.5), (0.7, 0.9)), more=CNN)
    for steps in (8, H, 128)
]
DILOCO_MUON = Variant(method="diloco", name="diloco, Muon", H=H, settings=DILOCO[0].settings, more=MUON)
AUTHORS = Variant(
    method="dct_momentum", H=H, codec=f"dct-{SPARSE}-int8-12bit", k=K, settings=buffer((0.7, 0.5), (0.35, 0.9)),
    more=CNN,
)  # fmt: skip
SHARED = Variant(
    method="dct_momentum_shared",
    H=H,
    codec=AUTHORS.codec,
    k=K,
    settings=outer((0.7, 0.5), (0.5, 0.8)),
    more=CNN,
)
SPARSELOCO = Variant(
    method="sparseloco",
    H=H,
    codec=f"{SPARSE}-2bit-12bit",
    k=K,
    settings=buffer((0.7, 0.95), (1.0, 0.95)),
    more=CNN,
)
MULOCO = Variant(method="muloco", H=H, codec="2bit", settings=DILOCO[0].settings, more=MUON)
ROWS = Variant(method="random_rows", H=H, codec=f"rows{K}-bf16", k=K, settings=SPARSELOCO.settings, more=CNN)
DEMO = Variant(
    method="demo", H=1, codec="dct-top32-fp32-12bit", k=32, settings=buffer((3e-4, 0.999), (1e-3, 0.999)),
    more=CNN,
)  # fmt: skip
COMPRESSED = [AUTHORS, SHARED, SPARSELOCO, MULOCO, ROWS, DEMO]
VARIANTS = [*DILOCO, DILOCO_MUON, *COMPRESSED]
ON_RESNET = [DILOCO[1], SHARED, SPARSELOCO]


def plan(rows: list[Row]) -> list[Cell]:
    """Every setting at one seed; the best of each at both; a ResNet with the best at one seed."""
    tried = every_setting(VARIANTS, TUNED_ON, NUM_LEARNERS, STEPS)
    if not all_done(tried, rows):
        return tried
    seeds = [v.cell(seed, NUM_LEARNERS, STEPS, best(rows, v)) for v in VARIANTS for seed in SEEDS[1:]]
    return tried + seeds + [resnet(v).cell(TUNED_ON, NUM_LEARNERS, STEPS, best(rows, v)) for v in ON_RESNET]


def best(rows: list[Row], variant: Variant) -> int:
    """The number of the setting with the lowest loss on the CNN."""
    return variant.best(rows, TUNED_ON, NUM_LEARNERS)


def of(rows: list[Row], variant: Variant) -> list[Row]:
    """Its rows on the CNN with the best setting."""
    return variant.rows(rows, setting=best(rows, variant))


def resnet(variant: Variant) -> Variant:
    """The same for the ResNet."""
    return replace(variant, name=f"{variant.label}, ResNet", more=RESNET)


def claims(rows: list[Row]) -> list[Claim]:
    small, middle, large = (of(rows, variant) for variant in DILOCO)
    by_size, by_chance = of(rows, SPARSELOCO), of(rows, ROWS)
    sent = {v.label: mb(middle) / mb(of(rows, v)) for v in (AUTHORS, SHARED)}
    return [
        Claim(
            claim="dct_momentum sends 16 times less than DiLoCo with as many rounds, all partners counted",
            figure=", ".join(f"{name} {times:.1f} times" for name, times in sent.items()),
            holds=sent[AUTHORS.label] >= 16,
        ),
        _between(AUTHORS, rows),
        _between(SHARED, rows),
        Claim(
            claim="more local steps cost DiLoCo accuracy (H = 128 against 8)",
            figure=_points(large, small), holds=_apart(large, small) < 0,
        ),
        Claim(
            claim="elements by size beat rows by chance (sparseloco, random_rows)",
            figure=f"{_points(by_size, by_chance)} at {mb(by_size):.2f} against {mb(by_chance):.2f} MB up",
            holds=_apart(by_size, by_chance) > 0,
        ),
        *(_near(v, rows) for v in (SHARED, SPARSELOCO)),
        *(_near(resnet(v), rows, resnet(DILOCO[1])) for v in ON_RESNET[1:]),
    ]  # fmt: skip


ALLOWED = 0.005  # of accuracy


def _near(variant: Variant, rows: list[Row], reference: Variant | None = None) -> Claim:
    """On the CNN, or, with a reference, on the ResNet."""
    if reference is None:
        found, against = of(rows, variant), of(rows, DILOCO[1])
    else:
        found, against = variant.rows(rows), reference.rows(rows)
    return Claim(
        claim=f"{variant.label} is within half a point of accuracy of DiLoCo with equal rounds",
        figure=f"{_points(found, against)} at {mb(against) / mb(found):.0f} times fewer bytes up",
        holds=_apart(found, against) >= -ALLOWED,
    )


def _between(variant: Variant, rows: list[Row]) -> Claim:
    """The paper: between DiLoCo at H = 128 and 512, 32 and 128 here."""
    value = mean(of(rows, variant), "eval_loss")
    low, high = (mean(of(rows, v), "eval_loss") for v in DILOCO[1:])
    return Claim(
        claim=f"{variant.label}: loss at most DiLoCo's at H = 128",
        figure=f"{value:.3f}; H = 32: {low:.3f}, H = 128: {high:.3f}",
        holds=value <= high,
    )


def _apart(rows: list[Row], reference: list[Row]) -> float:
    """Mean difference of accuracies; both are of the same seeds."""
    return mean(rows, "accuracy") - mean(reference, "accuracy")


def _points(rows: list[Row], reference: list[Row]) -> str:
    return f"{100 * _apart(rows, reference):+.2f} points"


def picture(rows: list[Row]) -> Figure:
    """Accuracy over what a learner sends: of the CNN, and of the ResNet."""
    figure, (left, right) = panels(2)
    for variant in VARIANTS:
        text = variant.label + (f", H = {variant.H}" if variant.method == "diloco" else "")
        _dots(left, of(rows, variant), COLOURS[variant.label], text)
    for variant in ON_RESNET:
        _dots(right, resnet(variant).rows(rows), COLOURS[variant.label], variant.label)
    for ax, what in ((left, "CNN, held-out accuracy"), (right, "ResNet with BatchNorm, held-out accuracy")):
        ax.set_xscale("log")
        ax.minorticks_off()
        ax.margins(x=0.2, y=0.15)
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:g} %")
        label(ax, "MB sent by a learner", what)
    return figure


def _dots(ax: Axes, rows: Sequence[Row], colour: str, text: str) -> None:
    accuracies = [100 * r["accuracy"] for r in rows]
    ax.plot([mb(rows)] * len(rows), accuracies, "o", color=colour, markersize=5)
    place = (mb(rows), max(accuracies))
    ax.annotate(text, place, (4, 4), textcoords="offset points", fontsize=7, color=INK)


def page(rows: list[Row], claims: list[Claim]) -> str:
    head = ["method", "H", "k of 4096", "rounds x density", "accuracy", "loss", "MB up", "MB down", "outer"]
    body = [_line(of(rows, v), v, v.settings[best(rows, v)]) for v in VARIANTS]
    body += [_line(resnet(v).rows(rows), resnet(v), v.settings[best(rows, v)]) for v in ON_RESNET]
    return write_page(
        STUDY.name, "Bytes of an image classifier", question=QUESTION, setup=SETUP, table=markdown(head, body),
        meaning=MEANING, limits=LIMITS, claims=claims,
    )  # fmt: skip


def _line(rows: list[Row], variant: Variant, setting: Mapping[str, Any]) -> list[object]:
    outer = ", ".join(f"{_SHORT[name]} {value:g}" for name, value in setting.items())
    return [
        variant.label, variant.H, variant.k, f"{variant.rounds_x_density(STEPS):g}",
        percent(mean(rows, "accuracy")), losses(rows), f"{mb(rows):.2f}", f"{mb(rows, 'bytes_down'):.2f}", outer,
    ]  # fmt: skip


_SHORT = {"outer_lr": "lr", "outer_momentum": "momentum", "buffer_decay": "decay"}

QUESTION = """Are the methods that save bytes on a language model as good on images, with convolutions, and with
BatchNorm, whose statistics travel uncompressed?"""

SETUP = f"""Fashion-MNIST, all 60 000 images in equal parts over {NUM_LEARNERS} learners, {STEPS} steps of 32
images a learner, inner lr 4e-3, no augmentation; held out are the 10 000 test images. A CNN of 34 thousand
parameters: two settings of the outer step at one seed, the better at two, paired by weights and data order. A
ResNet-8 of 78 thousand (side halved at once), with the CNN's settings, one seed. H = 8, 32, 128 stand for 30, 128,
512. Bytes are bodies of transfers with their frames; the first upload and the hand-in are included."""

LIMITS = """Other data; learners whose images are of different classes, as every learner's part is alike here; more
than two settings a method; how much of a difference is another seed's, of which there are two, and one for the
ResNet."""

MEANING = """As with language, and closer together: DCT coefficients with feedback and one shared model end a
quarter of a point of accuracy behind DiLoCo in 22 times fewer bytes up (half a point on the ResNet), sparseloco
a point behind in 31 times fewer. Muon inside with 2 bits (muloco) is level with DiLoCo in 14 times fewer. By
the authors' rule learners drift apart here too, but their average stays a model: two points behind, at a
payload for every partner. Rows by chance lose four points. More local steps cost DiLoCo next to nothing."""

STUDY = Study(name="bytes_vision", plan=plan, claims=claims, picture=picture, page=page)
