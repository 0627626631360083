"""One palette and one way to make a picture: a matplotlib Figure (no pyplot) that becomes inline SVG.

Every colour has a name. In the SVG it is a CSS variable with the colour as fallback, so a page can switch
to dark without redrawing and the picture still stands alone.
"""

import io
import re

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

LIGHT = {
    "ink": "#1f2a37",
    "muted": "#6b7785",
    "grid": "#e3e7ec",
    "paper": "#ffffff",
    "blue": "#2f6db3",
    "sky": "#9fc3e8",
    "green": "#3c8d5a",
    "amber": "#d99a2b",
    "red": "#c2403a",
    "grey": "#c3cad3",
}
DARK = {
    "ink": "#e6e9ee",
    "muted": "#98a3b1",
    "grid": "#2c343e",
    "paper": "#161b22",
    "blue": "#6aa9ec",
    "sky": "#31587f",
    "green": "#5fb981",
    "amber": "#e0ab4b",
    "red": "#ea6f68",
    "grey": "#4b5561",
}
INK, MUTED, GRID, PAPER, BLUE, SKY, GREEN, AMBER, RED, GREY = LIGHT.values()
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def new_figure(width: float = 6.0, height: float = 2.6) -> tuple[Figure, Axes]:
    """An empty picture of that many inches, with axes in the house style."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    figure.patch.set_alpha(0.0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0.0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.tick_params(colors=MUTED, labelsize=8.5, length=0, pad=5)
    axes.grid(True, axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def label(axes: Axes, x: str = "", y: str = "") -> None:
    """Name the axes; the vertical one at its top, where one reads first. Time needs no name."""
    if x:
        axes.set_xlabel(x, color=MUTED, fontsize=8.5, loc="right")
    axes.set_title(y, color=MUTED, fontsize=8.5, loc="left", pad=6)


def svg(figure: Figure, name: str) -> str:
    """The picture as one `<svg>` element. `name` makes its ids unique within a page."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    for size in ("width", "height"):
        text = re.sub(rf'(<svg [^>]*?) {size}="[^"]*pt"', r"\1", text, count=1)
    text = re.sub(r"(font: [^;\"]*?px) [^;\"]*", rf"\1 {FONT}", text)
    for word, colour in LIGHT.items():
        text = text.replace(colour, f"var(--{word}, {colour})")
    return text


def time_axis(axes: Axes, end_s: float) -> None:
    """The horizontal axis is time since the run's start, in the unit that suits its length."""
    divisor, unit = next((d, u) for d, u, most in _UNITS if end_s <= most)
    step = next((s for s in _STEPS_S if end_s / s <= 7), 86_400 * max(1, round(end_s / 7 / 86_400)))
    axes.set_xlim(0, end_s or 1.0)
    axes.xaxis.set_major_locator(MultipleLocator(step))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / divisor:g} {unit}" if x > 0 else "0"))


_UNITS = ((1, "s", 300), (60, "min", 10_800), (3600, "h", 259_200), (86_400, "days", float("inf")))
_STEPS_S = (
    0.01,
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
    20,
    30,
    60,
    120,
    300,
    600,
    1200,
    1800,
    3600,
    7200,
    21_600,
    43_200,
)
