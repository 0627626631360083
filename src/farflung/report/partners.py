"""The pictures that only a gossip run has: how far apart learners are, who met whom, what went between them."""

from collections import Counter
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from farflung.report.canvas import (
    BLUE,
    GREEN,
    GRID,
    INK,
    MUTED,
    PAPER,
    RED,
    SKY,
    label,
    new_figure,
    svg,
    time_axis,
)
from farflung.report.drawing import columns, cumulated, tag, thin, words_above
from farflung.report.gossip import Gossip
from farflung.report.history import History, natural
from farflung.report.meetings import Meeting, meetings
from farflung.report.pictures import Frame
from farflung.report.wording import num_bytes

MAX_NUMBERS = 24  # learners; with more, counts are shades only
DECADES = 2.0  # of a picture, below which ticks at 2 and 5 are wanted too


def consensus(history: History, frame: Frame, name: str = "") -> str:
    """Consensus distance at each average, and what pairs that met say of it in between; log scale."""
    gossip = history.gossip or Gossip()
    figure, axes = new_figure()
    label(axes, "", "consensus distance")
    if frame.distance is not None:
        _log_axis(axes, *frame.distance)
        pairs = thin(sorted(p for p in gossip.pairs() if p[1] > 0))
        axes.plot(*columns(pairs), "o", color=SKY, markersize=2.6, markeredgewidth=0)
        line = [(a.t, a.distance) for a in gossip.averages if a.distance > 0]
        if line:
            axes.plot(*columns(thin(line)), color=BLUE, linewidth=2, marker="o", markersize=4.5)
            falls = len(line) > 1 and line[-2][1] > line[-1][1]
            tag(axes, line[-1], f"{line[-1][1]:.3g}", BLUE, dy=-11 if falls else 11)
    time_axis(axes, frame.end_s)
    return svg(figure, f"consensus-{name}")


def _log_axis(axes: Axes, low: float, high: float) -> None:
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    subs = (1.0, 2.0, 5.0) if high / low < 10**DECADES else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=7))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


# ---- who met whom --------------------------------------------------------------------------------------


def who_met(history: History, frame: Frame, name: str = "") -> str:
    """Learners by learners: above the diagonal how often two mixed, below it how often they missed each other."""
    learners = history.learners
    n = max(1, len(learners))
    cell = min(0.42, 4.4 / n)
    figure, axes = new_figure(6.0, n * cell + 0.75)
    place = {learner: i for i, learner in enumerate(learners)}
    found = meetings(history.gossip or Gossip())
    numbers = 7.0 + 2.5 * min(1.0, (cell - 0.18) / 0.24) if n <= MAX_NUMBERS else None  # points
    for i in range(n):
        axes.add_patch(Rectangle((i, i), 1, 1, color=GRID, linewidth=0))
    _cells(axes, _counts(found, place, mixed=True), BLUE, numbers)
    _cells(axes, _counts(found, place, mixed=False), RED, numbers)
    _square(axes, learners)
    words_above(axes, [("met", BLUE), ("missed", RED)], n * cell)
    return svg(figure, f"met-{name}")


def _counts(found: list[Meeting], place: dict[str, int], mixed: bool) -> dict[tuple[int, int], int]:
    """(column, row) -> how often: the pair's cell above the diagonal if it mixed, else that below."""
    counts: Counter[tuple[int, int]] = Counter()
    for meeting in found:
        if (meeting.outcome == "mixed") == mixed and all(who in place for who in meeting.pair):
            low, high = sorted(place[who] for who in meeting.pair)
            counts[(high, low) if mixed else (low, high)] += 1
    return counts


def _cells(axes: Axes, counts: dict[tuple[int, int], int], colour: str, numbers: float | None) -> None:
    most = max(counts.values(), default=1)
    for (column, row), count in counts.items():
        alpha = 0.15 + 0.75 * count / most
        axes.add_patch(Rectangle((column, row), 1, 1, color=colour, alpha=alpha, linewidth=0))
        if numbers is not None:
            ink = PAPER if alpha > 0.62 else INK
            axes.text(
                column + 0.5, row + 0.5, str(count), color=ink, fontsize=numbers, ha="center", va="center"
            )


def _square(axes: Axes, learners: Sequence[str]) -> None:
    """Row and column a learner, the first at the top left; columns by number where names differ in it only."""
    n = max(1, len(learners))
    every = 1 if n <= MAX_NUMBERS else -(-n // 16)
    heads = {natural(name)[0] for name in learners}
    short = [name.removeprefix(natural(name)[0]) for name in learners] if len(heads) == 1 else list(learners)
    shown = range(0, len(learners), every)
    axes.set_xlim(0, n)
    axes.set_ylim(n, 0)
    axes.set_aspect("equal", anchor="W")
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(labelcolor=INK)
    axes.set_yticks([i + 0.5 for i in shown], [learners[i] for i in shown])
    rotation = 90 if len(heads) > 1 else 0
    axes.set_xticks([i + 0.5 for i in shown], [short[i] for i in shown], rotation=rotation)
    for line in range(n + 1):
        axes.axhline(line, color=GRID, linewidth=0.6)
        axes.axvline(line, color=GRID, linewidth=0.6)
    label(axes, y=" ")  # room for the words


# ---- bytes ---------------------------------------------------------------------------------------------


def traffic(history: History, frame: Frame, name: str = "") -> str:
    """Bytes so far: from partner to partner, to the hub, from the hub."""
    figure, axes = new_figure()
    kinds = [
        ("partners", GREEN, [(x.t, x.up) for x in history.transfers if x.partner and x.up]),
        ("to hub", BLUE, [(x.t, x.up) for x in history.transfers if not x.partner and x.up]),
        ("from hub", MUTED, [(x.t, x.down) for x in history.transfers if not x.partner and x.down]),
    ]
    words = []
    for word, colour, amounts in kinds:
        line = cumulated(amounts, history.end_s)
        axes.plot(*columns(thin(line)), color=colour, linewidth=2)
        words.append((f"{word} {num_bytes(line[-1][1] if line else 0)}", colour))
    words_above(axes, words, 6.0)
    label(axes, y=" ")  # room for the words
    axes.set_ylim(0, frame.bytes * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: num_bytes(y)))
    time_axis(axes, frame.end_s)
    return svg(figure, f"traffic-{name}")
