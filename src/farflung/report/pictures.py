"""The pictures of a run, each a pure function of its history that returns one inline SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from farflung.report import spans
from farflung.report.canvas import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
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
from farflung.report.drawing import Points, columns, cumulated, tag, tag_inside, thin, words_above
from farflung.report.figures import largest_merge_gap, usual_merge_gap_s
from farflung.report.history import Data, History, Merged, Step, median
from farflung.report.outages import outages
from farflung.report.wording import num_bytes, percent, seconds, short

NARROW = 6.0  # inches
MAX_TICKS = 1500  # merge marks
SPAN_COLOURS = {"joining": AMBER, "training": BLUE, "waiting": GREY, "silent": GREY, "dead": RED}
FATE_COLOURS = (AMBER, RED, MUTED, GREY)


@dataclass(frozen=True)
class Frame:
    """Axis ranges that several runs share, so that pictures next to each other compare."""

    end_s: float
    evals_end_s: float  # the last evaluation comes after the end of the run
    tokens: int
    loss: tuple[float, float]
    learners: int
    bytes: int
    distance: tuple[float, float] | None = None  # gossip: consensus distances, if there are any

    @classmethod
    def around(cls, histories: Sequence[History]) -> "Frame":
        losses = [loss for h in histories for loss in _losses(h)]
        low, high = (min(losses), max(losses)) if losses else (0.0, 1.0)
        pad = 0.06 * (high - low or 1.0)
        return cls(
            end_s=max(h.end_s for h in histories),
            evals_end_s=max(max(h.end_s, *(float(e["t"]) for e in h.evals), 0.0) for h in histories),
            tokens=max(max(h.tokens, *(int(e["tokens"]) for e in h.evals), 1) for h in histories),
            loss=(low - pad, high + pad),
            learners=max(max(h.num_learners, *(m.breadth for m in h.merges), 1) for h in histories),
            bytes=max(
                max(sum(x.up for x in h.transfers), sum(x.down for x in h.transfers), 1) for h in histories
            ),
            distance=_distances(histories),
        )


def _distances(histories: Sequence[History]) -> tuple[float, float] | None:
    found = [d for h in histories if h.gossip for d in h.gossip.distances() if d > 0]
    return (0.6 * min(found), 1.7 * max(found)) if found else None


# ---- loss ----------------------------------------------------------------------------------------------


def loss_by_tokens(history: History, frame: Frame, name: str = "") -> str:
    """Training loss of each learner (smoothed) and evaluation loss against tokens of the whole run."""
    figure, axes = new_figure()
    label(axes, "tokens of the whole run", "loss")
    train = [[(float(s.run_tokens), loss) for s, loss in line] for line in _training(history)]
    axes.set_xlim(0, frame.tokens)
    _draw_loss(axes, train, [(float(e["tokens"]), float(e["loss"])) for e in history.evals], frame)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(x)))
    return svg(figure, f"loss-tokens-{name}")


def loss_by_time(history: History, frame: Frame, name: str = "") -> str:
    """The same against time."""
    figure, axes = new_figure()
    label(axes, "", "loss")
    train = [[(s.end_s, loss) for s, loss in line] for line in _training(history)]
    time_axis(axes, frame.evals_end_s)
    _draw_loss(axes, train, [(float(e["t"]), float(e["loss"])) for e in history.evals], frame)
    return svg(figure, f"loss-time-{name}")


def _draw_loss(axes: Axes, train: list[Points], evals: Points, frame: Frame) -> None:
    """Into axes whose horizontal range is set: labels go where there is room."""
    for points in train:
        axes.plot(*columns(thin(points)), color=SKY, linewidth=0.9, solid_capstyle="round")
    if evals:
        axes.plot(*columns(thin(evals)), color=BLUE, linewidth=2.2, solid_capstyle="round")
        axes.plot(*evals[-1], "o", color=BLUE, markersize=4.5)
        tag_inside(axes, evals[-1], f"eval {evals[-1][1]:.3f}", BLUE, dy=9)
    first = [points[0] for points in train if points]
    if first:
        highest = max(first, key=lambda p: p[1])
        tag_inside(axes, highest, "training, each learner", MUTED, dy=2, dx=10, left=True)
    axes.set_ylim(*frame.loss)


def _training(history: History) -> list[list[tuple[Step, float]]]:
    """(step, smoothed loss) of each learner, in lines that break where it did not train.

    Smoothing is an exponential mean over about a thirtieth of the learner's steps.
    """
    lines: list[list[tuple[Step, float]]] = []
    for steps in history.steps.values():
        keep = 1 - 1 / max(1.0, len(steps) / 30)
        pause_s = 4 * median(s.end_s - s.start_s for s in steps)
        mean, last = None, float("-inf")
        for step in (s for s in steps if s.loss is not None):
            assert step.loss is not None
            mean = step.loss if mean is None else keep * mean + (1 - keep) * step.loss
            if step.end_s - last > pause_s:
                lines.append([])
            lines[-1].append((step, mean))
            last = step.end_s
    return lines


def _losses(history: History) -> list[float]:
    return [loss for line in _training(history) for _, loss in line] + [
        float(e["loss"]) for e in history.evals
    ]


# ---- who was alive -------------------------------------------------------------------------------------


def timeline(history: History, frame: Frame, name: str = "", width: float = 11.0) -> str:
    """A row a learner: joining, training, silent, dead; faults and rejoins; below, every merge as a tick.

    Gossip: missed meetings as ticks in the rows of those who missed a partner; below, every round that ended.
    """
    learners = history.learners
    figure, axes = new_figure(width, 1.5 + 0.34 * len(learners))
    rows = {learner: len(learners) - i for i, learner in enumerate(learners)}
    for learner, row in rows.items():
        for span in spans.alive(history, learner):
            _draw_span(axes, span, row)
    _draw_missed(axes, history, rows)
    _draw_outages(axes, history, rows, 0.1 * frame.end_s)
    _draw_merges(axes, history)
    axes.set_yticks([*rows.values(), 0], [*rows, "merges" if history.gossip is None else "rounds"])
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(-0.95, len(learners) + 0.75)
    axes.grid(False)
    label(axes, y=" ")  # room for the legend
    _legend(axes, history, width)
    time_axis(axes, frame.end_s)
    return svg(figure, f"timeline-{name}")


def _draw_span(axes: Axes, span: spans.Span, row: int) -> None:
    height = {"dead": 0.08, "silent": 0.3, "waiting": 0.3}.get(span.state, 0.56)
    alpha = {"training": 0.85, "joining": 0.9}.get(span.state, 1.0)
    box = [(span.start_s, span.end_s - span.start_s)]
    axes.broken_barh(
        box, (row - height / 2, height), color=SPAN_COLOURS[span.state], alpha=alpha, linewidth=0
    )


def _draw_missed(axes: Axes, history: History, rows: dict[str, int]) -> None:
    for m in _thin_marks([m for m in history.merges if m.breadth < m.live] if history.gossip else []):
        row = rows[m.learners[0]]
        axes.vlines(m.t, row - 0.36, row + 0.36, color=RED, linewidth=1.4)


def _draw_outages(axes: Axes, history: History, rows: dict[str, int], early_s: float) -> None:
    """Causes in words to the left, but for early ones, which would lie on the learners' names."""
    for outage in outages(history):
        row = rows.get(outage.learner)
        if row is None:
            axes.axvline(outage.began_s, color=RED, linewidth=1, linestyle=(0, (3, 2)))
            continue
        word = outage.cause.split(" ")[0].rstrip(":")
        axes.plot(
            outage.began_s, row, "X", color=RED, markersize=8, markeredgecolor=PAPER, markeredgewidth=0.8
        )
        early = outage.began_s < early_s
        tag(axes, (outage.began_s, row), word, RED, dy=0, dx=8 if early else -8, left=early)
        if outage.merged_s is not None:
            axes.plot(
                outage.merged_s,
                row,
                "o",
                color=GREEN,
                markersize=7,
                markeredgecolor=PAPER,
                markeredgewidth=0.8,
            )


def _draw_merges(axes: Axes, history: History) -> None:
    merges = _thin_marks(history.merges)
    axes.vlines([m.t for m in merges], -0.24, 0.24, color=INK, linewidth=0.9)
    gap, usual = largest_merge_gap(history), usual_merge_gap_s(history)
    if gap is None or gap[1] - gap[0] < 2 * usual:
        return
    axes.annotate(
        "",
        (gap[0], -0.42),
        (gap[1], -0.42),
        arrowprops={"arrowstyle": "|-|,widthA=0.22,widthB=0.22", "color": RED, "shrinkA": 0, "shrinkB": 0},
    )
    what = "a merge" if history.gossip is None else "a round's end"
    axes.text(
        (gap[0] + gap[1]) / 2, -0.52, f"longest without {what}: {seconds(gap[1] - gap[0])}",
        color=RED, fontsize=8.5, ha="center", va="top",
    )  # fmt: skip


def timeline_narrow(history: History, frame: Frame, name: str = "") -> str:
    """The same at half width, to stand next to another."""
    return timeline(history, frame, name, width=NARROW)


def _legend(axes: Axes, history: History, width: float) -> None:
    """The states that occur, as words in their colour above the rows."""
    states = {s.state for learner in history.learners for s in spans.alive(history, learner)}
    words: list[tuple[str, str]] = [(state, SPAN_COLOURS[state]) for state in SPAN_COLOURS if state in states]
    words = [(w, MUTED if c == GREY else c) for w, c in words]
    if history.of_kind("rejoined"):
        first = "first work merged" if history.gossip is None else "first mix with a partner"
        words.append((f"● rejoined: {first}" if width > NARROW else "● rejoined", GREEN))
    if history.gossip and any(m.breadth < m.live for m in history.merges):
        words.append(("| missed a partner" if width > NARROW else "| missed", RED))
    words_above(axes, words, width)


# ---- merges, bytes, ledger -----------------------------------------------------------------------------


def breadth(history: History, frame: Frame, name: str = "") -> str:
    """Contributors of every merge, under the number of live learners."""
    figure, axes = new_figure()
    label(axes, "", "learners in each merge")
    merges = [m for m in history.merges if not m.final]
    points = [(m.t, m.breadth) for m in _thin_marks(merges)]
    if points:
        axes.step(*columns([(m.t, m.live) for m in merges]), where="post", color=GREY, linewidth=1.6)
        tag(axes, (merges[0].t, merges[0].live), "live", MUTED, dy=8, left=True)
        axes.plot(*columns(points), "o", color=BLUE, markersize=3.6, markeredgewidth=0)
        alone = [(m.t, m.breadth) for m in merges if m.breadth <= 1 < m.live]
        if alone:
            axes.plot(*columns(alone), "o", color=RED, markersize=4.5, markeredgewidth=0)
            tag(axes, alone[0], "alone", RED, dy=-9, left=True)
    axes.set_ylim(0, frame.learners * 1.18)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    time_axis(axes, frame.end_s)
    return svg(figure, f"breadth-{name}")


def traffic(history: History, frame: Frame, name: str = "") -> str:
    """Payload bytes sent up and down so far, all learners together."""
    figure, axes = new_figure()
    label(axes, "", "payload so far, all learners")
    up = cumulated([(x.t, x.up) for x in history.transfers if x.up], history.end_s)
    down = cumulated([(x.t, x.down) for x in history.transfers if x.down], history.end_s)
    for word, colour, line, other in (("up", GREEN, up, down), ("down", BLUE, down, up)):
        if line:
            room = (other[-1][1] - line[-1][1]) / frame.bytes if other else 1.0  # to the other line
            axes.plot(*columns(thin(line)), color=colour, linewidth=2)
            text = f"{word} {num_bytes(line[-1][1])}"
            tag(axes, line[-1], text, colour, dy=-9 if 0 < room < 0.15 else 9)
    axes.set_ylim(0, frame.bytes * 1.18)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: num_bytes(y)))
    time_axis(axes, frame.end_s)
    return svg(figure, f"traffic-{name}")


def ledger(fates: Data, name: str = "") -> str:
    """Where the token-fragments went, as one bar: merged, discarded by reason, in flight."""
    figure, axes = new_figure(11.0, 1.35)
    trained = fates["trained"] or 1
    parts = [("merged", fates["merged"], BLUE)]
    lost = sorted(fates["discarded"].items(), key=lambda x: -x[1])
    parts += [(w, n, FATE_COLOURS[min(i, 3)]) for i, (w, n) in enumerate(lost)]
    parts += [(w.replace("_", " "), fates.get(w, 0), SKY) for w in ("in_flight", "unaccounted")]
    parts = [(word.replace("_", " "), n, colour) for word, n, colour in parts if n]
    left = 0.0
    for word, n, colour in parts:
        axes.barh(0, n / trained, left=left, height=0.5, color=colour, linewidth=0)
        if word == "merged":
            axes.text(
                left + 0.008,
                0,
                f"merged {percent(n / trained)}",
                color=PAPER,
                fontsize=9.5,
                va="center",
                fontweight="bold",
            )
        left += n / trained
    _ledger_words(axes, [(w, n / trained, c) for w, n, c in parts if w != "merged"])
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.75, 0.3)
    axes.axis("off")
    return svg(figure, f"ledger-{name}")


def _ledger_words(axes: Axes, parts: list[tuple[str, float, str]]) -> None:
    """Name the small parts in one line under the bar, right-aligned: they're too narrow to write into."""
    x = 1.0
    for word, fraction, colour in reversed(parts):
        text = f"{word} {percent(fraction)}"
        axes.text(x, -0.42, text, color=MUTED if colour == GREY else colour, fontsize=9, ha="right", va="top")
        x -= 0.0068 * len(text) + 0.02


# ---- helpers -------------------------------------------------------------------------------------------


def _thin_marks(merges: Sequence[Merged]) -> list[Merged]:
    """Marks for drawing: when there are too many, those nearest to the last one fall."""
    if len(merges) <= MAX_TICKS:
        return list(merges)
    least = (merges[-1].t - merges[0].t) / MAX_TICKS
    out = [merges[0]]
    for _, m in pairwise(merges):
        if m.t - out[-1].t >= least:
            out.append(m)
    return out
