"""The headline figures of a summary: name, how each is shown, and what it means to a newcomer."""

from collections.abc import Callable
from dataclasses import dataclass

from farflung.report.history import Data
from farflung.report.wording import num_bytes, percent, seconds, short


@dataclass(frozen=True, kw_only=True)
class Row:
    """`show` takes the whole summary. `headline`: shown at the top; `barred`: compared by bars."""

    name: str
    key: str
    show: Callable[[Data], str]
    why: str
    headline: bool = True
    barred: bool = False


def _loss(s: Data) -> str:
    start, final = s.get("eval_loss_start"), s.get("eval_loss_final")
    return "not evaluated" if start is None or final is None else f"{start:.3f} → {final:.3f}"


def _bytes(s: Data) -> str:
    return " / ".join(num_bytes(s[k]) if s.get(k) is not None else "–" for k in ("bytes_up", "bytes_down"))


ROWS = [
    Row(
        name="evaluation loss",
        key="eval_loss_final",
        show=_loss,
        why="of the global parameters, first to last evaluation",
    ),
    Row(
        name="goodput",
        key="goodput",
        show=lambda s: percent(s["goodput"]),
        why="of all learners' time was spent in training steps",
    ),
    Row(
        name="uptime",
        key="uptime",
        show=lambda s: percent(s["uptime"]),
        why="of the time at least a quorum of learners trained",
    ),
    Row(
        name="longest merge gap",
        key="largest_merge_gap_s",
        show=lambda s: seconds(s["largest_merge_gap_s"]),
        why="the longest time in which nothing was merged",
        barred=True,
    ),
    Row(
        name="usual merge gap",
        key="median_merge_gap_s",
        show=lambda s: seconds(s["median_merge_gap_s"]),
        why="median time from one merge to the next",
        headline=False,
    ),
    Row(
        name="killed / rejoined",
        key="rejoins",
        show=lambda s: f"{s['kills']} / {s['rejoins']}",
        why="a rejoin counts once its work is merged again",
    ),
    Row(
        name="tokens merged",
        key="merged_share",
        show=lambda s: percent(s["merged_share"]),
        why="of the trained token-fragments are part of the model",
    ),
    Row(
        name="learners per merge",
        key="mean_merge_breadth",
        show=lambda s: f"{s['mean_merge_breadth']:.2f} of {s['num_learners']}",
        why="on average",
    ),
    Row(
        name="bytes up / down",
        key="bytes_up",
        show=_bytes,
        why="bulk data, all learners together",
    ),
    Row(
        name="tokens trained",
        key="tokens_trained",
        show=lambda s: short(s["tokens_trained"]),
        why="by all learners together",
        headline=False,
    ),
    Row(
        name="steps",
        key="steps",
        show=lambda s: f"{s['steps']:,}",
        why="inner steps of all learners",
        headline=False,
    ),
    Row(
        name="merges",
        key="merges",
        show=lambda s: f"{s['merges']:,}",
        why="new versions of a fragment",
        headline=False,
    ),
    Row(
        name="time",
        key="wall_s",
        show=lambda s: seconds(s.get("wall_s") or 0.0),
        why="from start to end",
        headline=False,
    ),
    Row(
        name="ledger",
        key="ledger_exact",
        show=lambda s: "exact" if s["ledger_exact"] else "does not add up",
        why="every trained token was merged, discarded with a reason, or in flight",
        headline=False,
    ),
]
