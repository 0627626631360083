"""The verdict as tables."""

import math
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from farflung.plan.check import Figure
from farflung.plan.judging import Judged
from farflung.plan.setting import Setting
from farflung.protocol.policy import Policy
from farflung.units import KIB

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0
DATA_PARALLEL = "data-parallel"
HEADINGS = ("method", "M/K", "H/P/tau", "codec", "time", "goodput", "breadth", "up / down", "loss")
WIDTH = 150  # columns that the table needs


def plan_table(setting: Setting, judged: Sequence[Judged], reference: dict[str, float]) -> Table:
    """One line a candidate, best first, then what they are to beat."""
    table = Table(box=None, header_style="dim", title=_title(setting), title_justify="left", pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("method", "codec") else "right", no_wrap=True)
    table.add_column("limited by", min_width=30)
    for one in judged:
        table.add_row(*_row(one))
    moved = amount(reference["bytes_up"])
    table.add_row(
        DATA_PARALLEL, "1", "1", "fp32", duration(reference["time_s"]), f"{reference['goodput']:.1%}", "",
        f"{moved} / {moved}", "0", "the reference: all islands, in every step", style="dim",
    )  # fmt: skip
    return table


def _title(setting: Setting) -> str:
    own = f"{setting.islands} islands x {setting.chips:,} chips, {setting.params:.3g} parameters"
    lines = f"{mbps(setting.up_mbps)} up, {mbps(setting.down_mbps)} down, hub {mbps(setting.hub_mbps)}"
    return f"{own}, {setting.budget_tokens:.3g} tokens; {lines}"


def _row(one: Judged) -> list[str]:
    policy, M = one.candidate.policy, one.candidate.learners
    name = f"{one.candidate.method} (given)" if one.candidate.given else one.candidate.method
    shape = [policy.sync_every_steps, policy.num_fragments, policy.overlap_steps]
    return [
        name if one.fits else f"! {name}",
        str(M) if policy.topology == "gossip" else f"{M}/{one.candidate.quorum}",
        "/".join(map(str, shape)), _codecs(policy), with_spread(one.time_s.mean, one.time_s.half_width),
        f"{one.goodput.mean:.1%}" + ("" if one.simulated else " ~"),
        "" if one.breadth is None else f"{one.breadth:.1f}",
        f"{amount(one.bytes_up)} / {amount(one.bytes_down)}", one.quality.text, f"{one.limit}: {one.why}",
    ]  # fmt: skip


def _codecs(policy: Policy) -> str:
    """Up, and down where increments go down."""
    return policy.codec if policy.downlink_codec is None else f"{policy.codec} / {policy.downlink_codec}"


def notes(judged: Sequence[Judged]) -> list[str]:
    """What stands behind the columns of these candidates."""
    lines = ["! does not fit as it is. ~ closed forms only; all others: the simulator, with a 95 % interval."]
    parts = {(part.study, part.what): part for one in judged for part in one.quality.parts}
    lines += [
        f"loss: {p.what}: {p.figure}, against {p.against} (docs/results/{p.study}.md)" for p in parts.values()
    ]
    unknown = sorted({what for one in judged for what in one.quality.unknown})
    if unknown:
        lines.append("loss: ? " + "; ".join(unknown))
    if parts:
        lines.append("loss adds up what was measured one by one, on a small model: an assumption.")
    return lines


def check_table(name: str, figures: Sequence[Figure]) -> Table:
    """Predicted, measured, difference."""
    table = Table(box=None, header_style="dim", title=name, title_justify="left", pad_edge=False)
    table.add_column("figure")
    for heading in ("predicted", "measured", "difference", "promised"):
        table.add_column(heading, justify="right")
    for figure in figures:
        off = "" if figure.off is None else f"{100 * figure.off:+.1f} %"
        within = "" if figure.within is None else f"within {figure.within:.0%}"
        within = f"off: {within}" if figure.holds is False else within  # colour is lost in a pipe
        table.add_row(
            figure.name, shown(figure.predicted, figure.unit), shown(figure.measured, figure.unit), off, within,
            style="red" if figure.holds is False else None,
        )  # fmt: skip
    return table


def shown(value: float, unit: str) -> str:
    """A figure with its unit.

    >>> shown(0.5, "share"), shown(2.5e6, "bytes"), shown(0.25, "s"), shown(3.0, "")
    ('50.0 %', '2.38 MiB', '0.250 s', '3')
    """
    if unit == "share":
        return f"{100 * value:.1f} %"
    if unit == "bytes":
        return amount(value)
    return f"{value:.3f} s" if unit == "s" else f"{value:.4g}"


def amount(num_bytes: float) -> str:
    """Bytes in the unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < KIB:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= KIB
    return f"{num_bytes:.3g} PiB"


def duration(time_s: float) -> str:
    """Seconds in the unit that fits.

    >>> duration(45.0), duration(5400.0), duration(30 * 86_400.0)
    ('45 s', '90 min', '30 days')
    """
    if not math.isfinite(time_s):
        return "for ever"
    for length_s, unit in ((DAY_S, "days"), (HOUR_S, "h"), (MINUTE_S, "min")):
        if time_s >= 2 * length_s or (unit == "min" and time_s >= 100):
            return (
                f"{time_s / length_s:.3g} {unit}"
                if time_s / length_s < 100
                else f"{time_s / length_s:.0f} {unit}"
            )
    return f"{time_s:.3g} s"


def with_spread(time_s: float, half_width_s: float) -> str:
    """A time with what it may be off, relative."""
    if not math.isfinite(half_width_s):
        return duration(time_s)
    return f"{duration(time_s)} +-{100 * half_width_s / time_s:.1f} %"


def plain(setting: Setting) -> dict[str, float | None]:
    """For JSON, which has no infinity: null is unlimited, or never."""
    return {name: value if math.isfinite(value) else None for name, value in asdict(setting).items()}


def mbps(value: float) -> str:
    return "unlimited" if math.isinf(value) else f"{value:g} Mbit/s"
