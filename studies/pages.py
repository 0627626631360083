"""Half-page reports and pictures of studies, in one style."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from farflung.report.canvas import AMBER, BLUE, GREEN, GREY, GRID, INK, MUTED, PAPER, RED, SKY
from studies.harness import Claim, Row

COLOURS = (BLUE, GREEN, AMBER, RED, SKY, MUTED)

__all__ = ["AMBER", "BLUE", "COLOURS", "GREEN", "GREY", "INK", "MUTED", "RED", "SKY"]


def page(
    name: str, title: str, *, question: str, setup: str, table: str, meaning: str, limits: str,
    claims: Sequence[Claim],
) -> str:  # fmt: skip
    """A study's page: question, set-up, table, picture, what it means, what it does not show, claims."""
    tested = [["holds" if c.holds else "**does not hold**", c.claim, c.figure] for c in claims]
    return "\n\n".join([
        f"# {title}", f"**Question.** {question}", f"**Set-up.** {setup}", table, f"![{title}]({name}.svg)",
        f"**What it means.** {meaning}", f"**What it does not show.** {limits}",
        markdown(["", "claim", "figure"], tested),
        f"Cells: `{name}.json`. Made by `make study NAME={name}`; do not edit.",
    ])  # fmt: skip


def markdown(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table; all but its first column to the right."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, rule, *rows])


def percent(share: float, digits: int = 1) -> str:
    """
    >>> percent(0.1234), percent(0)
    ('12.3 %', '0.0 %')
    """
    return f"{100 * share:.{digits}f} %"


def change(differences: Sequence[float], digits: int = 1) -> str:
    """Mean of paired relative differences, and their range.

    >>> change([0.01, 0.03]), change([0.0])
    ('+2.0 % (+1.0 to +3.0)', '+0.0 %')
    """
    text = f"{100 * fmean(differences):+.{digits}f} %"
    if len(set(differences)) < 2:
        return text
    return f"{text} ({100 * min(differences):+.{digits}f} to {100 * max(differences):+.{digits}f})"


def losses(rows: Sequence[Row]) -> str:
    """Mean held-out loss of some cells, and their number if it is not the usual.

    >>> losses([{"eval_loss": 2.0}, {"eval_loss": 3.0}])
    '2.500'
    """
    return f"{fmean(row['eval_loss'] for row in rows):.3f}"


def panels(count: int, width: float = 7.6, height: float = 3.0, **options: Any) -> tuple[Figure, list[Axes]]:
    """An empty picture with panels side by side, in the house style."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
    axes = list(figure.subplots(1, count, squeeze=False, **options)[0])
    for ax in axes:
        for side in ("top", "right", "left"):
            ax.spines[side].set_visible(False)
        ax.spines["bottom"].set_color(GREY)
        ax.tick_params(colors=MUTED, labelsize=8.5, length=0, pad=5)
        ax.grid(True, axis="y", color=GRID, linewidth=0.8)
        ax.set_axisbelow(True)
    return figure, axes


def label(ax: Axes, x: str, y: str) -> None:
    ax.set_xlabel(x, color=MUTED, fontsize=8.5, loc="right")
    ax.set_title(y, color=INK, fontsize=9, loc="left", pad=6)


def line(
    ax: Axes, name: str, colour: str, points: Sequence[tuple[float, Sequence[float]]], **style: Any
) -> None:
    """A line through means, with every seed as a small dot; its name at its last point."""
    xs = [x for x, _ in points]
    ys = [fmean(values) for _, values in points]
    ax.plot(xs, ys, color=colour, linewidth=1.6, label=name, **style)
    for x, values in points:
        ax.plot([x] * len(values), values, ".", color=colour, markersize=4, alpha=0.7)


def legend(ax: Axes, **options: Any) -> None:
    ax.legend(frameon=False, fontsize=8, labelcolor=INK, **options)
