"""Cells and outcomes for people: a table, a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from farflung.errors import UserError
from farflung.simulate.outcome import Outcome

Cell = Mapping[str, Any]
HIDDEN = ("goodput_ci", "lost", "seeds", "uptime", "merge_breadth", "merged_share")


def cells_table(name: str, cells: Sequence[Cell]) -> Table:
    """Every cell a row; the last column says how far off the published value it is."""
    value = next(key for key in ("goodput", "time", "gbps") if key in cells[0])
    keys = [
        key for key in cells[0] if key not in HIDDEN and key not in ("published", value, "grid_steps_off")
    ]
    table = Table(
        title=name, box=None, header_style="dim", title_justify="left", caption=caption(cells, value)
    )
    for key in keys:
        table.add_column(key, justify="left" if isinstance(cells[0][key], str) else "right")
    for heading in (value, "+-", "published", "off"):
        table.add_column(heading, justify="right")
    for cell in cells:
        interval = cell.get("goodput_ci")
        half = "" if interval is None else f"{(interval[1] - interval[0]) / 2:.3f}"
        table.add_row(
            *(_shown(cell[key]) for key in keys),
            _shown(cell[value]),
            half,
            _shown(cell["published"]),
            _off(cell, value),
        )
    return table


def caption(cells: Sequence[Cell], value: str) -> str:
    """How far all cells are off."""
    if value == "gbps":
        counted = [c for c in cells if c["method"] != "data_parallel"]
        near = sum(c["grid_steps_off"] is not None and abs(c["grid_steps_off"]) <= 1 for c in counted)
        return f"{near} of {len(counted)} cells without data-parallel within one step of the grid"
    off = [100 * abs(c[value] - c["published"]) for c in cells if c["published"] is not None]
    return (
        f"mean error {sum(off) / len(off):.2f} points, largest {max(off):.2f}, {len(off)} cells"
        if off
        else ""
    )


def _off(cell: Cell, value: str) -> str:
    if cell["published"] is None or cell[value] is None:
        return ""
    if value == "gbps":
        return f"{cell['grid_steps_off']:+d} steps"
    return f"{100 * (cell[value] - cell['published']):+.1f}"


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if value < 10 else f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def outcome_table(outcome: Outcome) -> Table:
    """One scenario's outcome."""
    table = Table(box=None, show_header=False, caption=f"95 % intervals over {outcome.seeds} seeds")
    table.add_column()
    table.add_column(justify="right")
    for name in ("goodput", "uptime", "merge_breadth", "merged_share"):
        estimate = getattr(outcome, name)
        table.add_row(name, f"{estimate.mean:.3f} +- {estimate.half_width:.3f}")
    for name in (
        "tokens_trained_per_s",
        "tokens_merged_per_s",
        "bytes_up_per_s",
        "bytes_down_per_s",
        "missed_share",
    ):
        table.add_row(name, f"{getattr(outcome, name):.4g}")
    for cause, share in sorted(outcome.lost.items(), key=lambda item: -item[1]):
        if share >= 5e-5:
            table.add_row(f"lost: {cause}", f"{share:.2%}")
    return table


def picture(path: Path, name: str, cells: Sequence[Cell]) -> None:
    """Goodput by chips, ours as lines, the published as marks; or, without chips, ours against published.

    Raises:
        UserError: the file cannot be written, or its kind is unknown.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    if "goodput" in cells[0] and len({c["chips"] for c in cells}) > 1:
        rows = sorted({(c["method"], c["learners"]) for c in cells}, key=lambda row: (row[1], row[0]))
        for row in rows:
            own = [c for c in cells if (c["method"], c["learners"]) == row]
            (line,) = axes.plot(
                [c["chips"] for c in own], [c["goodput"] for c in own], label=f"{row[0]}, {row[1]}"
            )
            axes.plot([c["chips"] for c in own], [c["published"] for c in own], "o", color=line.get_color())
        axes.set(xscale="log", xlabel="chips", ylabel="goodput (marks: published)", ylim=(0, 1))
        axes.legend(fontsize="small")
    else:
        value = next(key for key in ("goodput", "time", "gbps") if key in cells[0])
        known = [c for c in cells if c["published"] is not None and c[value] is not None]
        axes.plot([c["published"] for c in known], [c[value] for c in known], "o")
        axes.axline((known[0]["published"], known[0]["published"]), slope=1, color="grey", linewidth=1)
        axes.set(xlabel=f"published {value}", ylabel="simulated")
        if value == "gbps":
            axes.set(xscale="log", yscale="log")
    axes.set_title(name)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be written: {error}") from None
    finally:
        plt.close(figure)
