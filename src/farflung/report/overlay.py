"""Several runs in one picture: evaluation loss against tokens, time and bytes."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from farflung.report.canvas import AMBER, BLUE, GREEN, GREY, INK, RED, SKY, label, new_figure, svg, time_axis
from farflung.report.history import Data, History
from farflung.report.wording import num_bytes, short

COLOURS = (BLUE, AMBER, GREEN, RED, INK, SKY, GREY)
Run = tuple[str, History]
"""Its name in the picture, and what happened."""


def loss_by_tokens(runs: Sequence[Run]) -> str:
    """What the data bought: tokens of all learners together."""
    axes, save = _draw(runs, lambda history, e: float(e["tokens"]), "tokens of the whole run")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(x)))
    return save("together-tokens")


def loss_by_time(runs: Sequence[Run]) -> str:
    """What the machines bought."""
    axes, save = _draw(runs, lambda history, e: float(e["t"]), "")
    time_axis(axes, max(history.end_s for _, history in runs))
    return save("together-time")


def loss_by_bytes(runs: Sequence[Run]) -> str:
    """What the links bought: bulk bytes up and down, of all learners together."""
    axes, save = _draw(runs, bytes_by_then, "bytes up and down, all learners")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: num_bytes(x)))
    return save("together-bytes")


def bytes_by_then(history: History, evaluation: Data) -> float:
    """Bytes that had moved at an evaluation: as counted then, else the payloads that the tape shows."""
    if "bytes_up" in evaluation:
        return float(evaluation["bytes_up"] + evaluation["bytes_down"])
    return float(sum(x.up + x.down for x in history.transfers if x.t <= evaluation["t"]))


def _draw(
    runs: Sequence[Run], place: Callable[[History, Data], float], across: str
) -> tuple[Axes, Callable[[str], str]]:
    figure, axes = new_figure(11.0, 3.4)
    label(axes, across, " ")  # room for the names
    reach = 0.0
    for number, (_, history) in enumerate(runs):
        points = [(place(history, e), float(e["loss"])) for e in history.evals]
        if points:
            colour = COLOURS[number % len(COLOURS)]
            dashes = "-" if number < len(COLOURS) else "--"
            xs, ys = [x for x, _ in points], [y for _, y in points]
            axes.plot(xs, ys, dashes, color=colour, linewidth=2, marker="o", markersize=3.2)
            reach = max(reach, *xs)
    axes.set_xlim(0, reach or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(7))
    _names(axes, [name for name, _ in runs])
    return axes, lambda name: svg(figure, name)


def _names(axes: Axes, names: Sequence[str]) -> None:
    """The runs' names in their colours, above the picture."""
    x = 0.0
    for number, name in enumerate(names):
        shown = axes.annotate(
            name, (x, 1.0), xycoords="axes fraction", xytext=(0, 5), textcoords="offset points",
            color=COLOURS[number % len(COLOURS)], fontsize=9, fontweight="bold", va="bottom",
        )  # fmt: skip
        shown.set_in_layout(False)
        x += (0.094 * len(name) + 0.25) / 11.0
