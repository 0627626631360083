"""What several pictures need: labels at points, fewer points, running sums."""

from collections.abc import Sequence

import matplotlib.patheffects as effects
from matplotlib.axes import Axes

from farflung.report.canvas import PAPER

Points = list[tuple[float, float]]

CHARACTER_PT = 5.4  # mean width of a character of a tag
MAX_POINTS = 300  # a line; more would only grow the page


def tag(
    axes: Axes, at: tuple[float, float], text: str, colour: str, dy: float, dx: float = 0, left: bool = False
) -> None:
    """A label at a data point, in the colour of what it names; `left`: the point is the text's left end."""
    mark = axes.annotate(
        text,
        at,
        xytext=(dx, dy),
        textcoords="offset points",
        color=colour,
        fontsize=8.5,
        fontweight="bold",
        ha="left" if left else "right",
        va="center",
        path_effects=[effects.withStroke(linewidth=2.5, foreground=PAPER)],
    )
    mark.set_in_layout(False)


def tag_inside(
    axes: Axes, at: tuple[float, float], text: str, colour: str, dy: float, dx: float = 0, left: bool = False
) -> None:
    """As `tag`, but on the other side of the point where the text would run over the end of the axis."""
    start, end = axes.get_xlim()
    width_pt = 72 * axes.bbox.width / axes.figure.dpi  # before the layout, which widens it
    before = (at[0] - start) / (end - start)
    room_pt = width_pt * (1 - before if left else before)
    flip = room_pt < abs(dx) + CHARACTER_PT * len(text) and (before > 0.5 if left else before < 0.5)
    tag(axes, at, text, colour, dy, -dx if flip else dx, left != flip)


def words_above(axes: Axes, words: Sequence[tuple[str, str]], width: float) -> None:
    """(word, colour) pairs in one line above the picture, which is `width` inches wide."""
    x = 0.0
    for word, colour in words:
        shown = axes.annotate(
            word, (x, 1.0), xycoords="axes fraction", xytext=(0, 4), textcoords="offset points",
            color=colour, fontsize=8.5, fontweight="bold", va="bottom",
        )  # fmt: skip
        x += (0.094 * len(word) + 0.22) / width
        shown.set_in_layout(False)


def cumulated(amounts: Sequence[tuple[float, int]], end_s: float) -> Points:
    """Running sums of (time, amount), up to the end."""
    total = 0.0
    out: Points = []
    for t, amount in sorted(amounts):
        total += amount
        out.append((t, total))
    return [*out, (max(end_s, out[-1][0]), total)] if out else []


def thin(points: Sequence[tuple[float, float]]) -> Points:
    """At most about MAX_POINTS of the points, the last one kept."""
    stride = max(1, -(-len(points) // MAX_POINTS))
    return [*points[:-1:stride], points[-1]] if points else []


def columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [p[0] for p in points], [p[1] for p in points]
