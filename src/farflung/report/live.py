"""The live view of a run in a terminal, from the status that the syncer serves; and the closing table.

In a terminal one block is redrawn in place; elsewhere (a pipe, a log) a plain line appears now and then.
"""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from farflung.report.results import result_table
from farflung.report.wording import num_bytes, seconds, short

__all__ = ["LiveView", "plain_line", "result_table", "screen"]

Status = dict[str, Any]

NUM_MERGES, NUM_NOTES = 5, 6
PLAIN_EVERY_S = 5.0
STATE_STYLES = {
    "training": "green",
    "joining": "yellow",
    "waiting": "yellow",
    "finishing": "cyan",
    "done": "cyan",
    "silent": "magenta",
    "dead": "bold red",
    "lost": "bold red",
}


class LiveView:
    """`with LiveView(console) as view: view.update(status)`. `update` never raises for a missing key.

    `clock` (seconds) only paces the plain lines.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic):
        self.console = console or Console(stderr=True)
        self.clock = clock
        self._live = (
            Live(console=self.console, auto_refresh=False, transient=False)
            if self.console.is_terminal
            else None
        )
        self._last_line_s = float("-inf")
        self._noted = 0

    def __enter__(self) -> "LiveView":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the last state on the screen. Repeats do nothing."""
        if self._live is not None:
            self._live.stop()

    def update(self, status: Status) -> None:
        """Show this status."""
        if self._live is not None:
            self._live.update(screen(status, self.console.width), refresh=True)
        else:
            self._plain(status)

    def _plain(self, status: Status) -> None:
        """New notes at once, a line of figures every PLAIN_EVERY_S."""
        notes = status.get("notes") or []
        for note in notes[self._noted :]:
            self.console.print(
                f"[{note['t']:7.1f} s] {note['text']}", markup=False, highlight=False, soft_wrap=True
            )
        self._noted = len(notes)
        if self.clock() - self._last_line_s >= PLAIN_EVERY_S:
            self._last_line_s = self.clock()
            self.console.print(plain_line(status), markup=False, highlight=False, soft_wrap=True)


def plain_line(status: Status) -> str:
    """The whole status in one line."""
    parts = [
        f"[{status.get('t_s', 0.0):7.1f} s] {status.get('phase', '')}",
        _budget(status),
        f"{short(status.get('tokens_per_s', 0))} tokens/s",
        f"{status.get('live', 0)}/{status.get('num_learners', 0)} live",
    ]
    if status.get("eval"):
        parts.append(f"eval {status['eval'][-1]['loss']:.3f}")
    if status.get("merges"):
        what = "average" if status.get("gossip") else "merge"
        parts.append(
            f"last {what} {_ago(status, status['merges'][-1]['t'])} of {status['merges'][-1]['breadth']}"
        )
    if status.get("gossip"):
        parts.append(_gossip(status))
    if status.get("waiting"):
        parts.append(f"waiting: {'; '.join(status['waiting'])}")
    return ", ".join(parts)


def screen(status: Status, width: int = 120) -> RenderableType:
    """Progress, learners, merges and events as one block for a terminal of that many columns."""
    parts: list[RenderableType] = [_headline(status), _progress(status, width)]
    if status.get("gossip"):
        parts.append(Text(_gossip(status), no_wrap=True, overflow="ellipsis"))
    parts += [Text(), _learners(status), Text()]
    last = [_averages(status) if status.get("gossip") else _merges(status), _notes(status)]
    parts += [_row(last)] if width >= 100 else [last[0], Text(), last[1]]
    parts += [Text(f"waiting: {reason}", style="yellow") for reason in status.get("waiting") or []]
    return Group(*parts)


def _headline(status: Status) -> Text:
    evals = status.get("eval") or []
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{status.get('method', '')} ", style="bold")
    line.append(f"{status.get('phase', '')}  ", style="cyan")
    live, wanted = status.get("live", 0), status.get("num_learners", 0)
    line.append(f"{live} of {wanted} live  ", style="" if live >= wanted else "bold red")
    if evals:
        start = f"{evals[0]['loss']:.3f} → " if len(evals) > 1 else ""
        line.append(f"eval loss {start}{evals[-1]['loss']:.3f}  ", style="bold")
    up, down = num_bytes(status.get("bytes_up") or 0), num_bytes(status.get("bytes_down") or 0)
    line.append(f"{up} up, {down} down", style="dim")
    return line


def _progress(status: Status, width: int) -> RenderableType:
    total, done = max(1, status.get("budget_tokens", 0)), status.get("tokens", 0)
    return _row(
        [
            ProgressBar(total, done, width=36 if width >= 100 else 14, complete_style="blue"),
            _budget(status),
            f"{short(status.get('tokens_per_s', 0))}/s",
            Text(_eta(status) + _merged(status), style="dim"),
        ],
        gap=2,
    )


def _gossip(status: Status) -> str:
    """Epoch, members, meetings missed, and how far apart learners were: only where they meet partners."""
    gossip = status["gossip"]
    missed, half = gossip.get("missed") or {}, gossip.get("half_exchanges", 0)
    parts = [f"epoch {gossip.get('epoch', 0)} ({gossip.get('members', 0)} members)"]
    if gossip.get("distance") is not None:
        parts.append(f"consensus distance {gossip['distance']:.3g}")
    parts.append(f"{short(gossip.get('meetings', 0))} meetings")
    if half:
        parts.append(f"{short(half)} half exchange{'s' if half > 1 else ''}")
    parts.append(f"{short(sum(missed.values()))} missed{_reasons(missed)}")
    return ", ".join(parts)


def _reasons(counts: dict[str, int]) -> str:
    """The most frequent first."""
    ordered = sorted(counts.items(), key=lambda x: (-x[1], x[0]))
    return (
        f" ({', '.join(f'{reason} {short(n)}' for reason, n in ordered if n)})"
        if any(counts.values())
        else ""
    )


def _budget(status: Status) -> str:
    tokens, budget = status.get("tokens", 0), status.get("budget_tokens", 0)
    share = f" ({100 * tokens / budget:.0f} %)" if budget else ""
    return f"{short(tokens)} of {short(budget)} tokens{share}"


def _merged(status: Status) -> str:
    fates = (status.get("ledger") or {}).get("token_fragments") or {}
    return f", {100 * fates['merged'] / fates['trained']:.0f} % merged" if fates.get("trained") else ""


def _eta(status: Status) -> str:
    left, speed = status.get("budget_tokens", 0) - status.get("tokens", 0), status.get("tokens_per_s", 0)
    if left <= 0:
        return "budget spent"
    return f"{seconds(left / speed)} left" if speed > 0 else "time left unknown"


def _learners(status: Status) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("learner")
    table.add_column("state", min_width=9)
    for name in ("step", "loss", "tokens/s", "incarnation", "seen"):
        table.add_column(name, justify="right")
    for learner in status.get("learners") or []:
        state = str(learner.get("state", ""))
        style = STATE_STYLES.get(state, "")
        table.add_row(
            str(learner.get("name", "")),
            Text(f"● {state}", style=style),
            _or_dash(learner.get("step"), "{}"),
            _or_dash(learner.get("loss"), "{:.3f}"),
            _or_dash(learner.get("tokens_per_s"), "", short),
            _or_dash(learner.get("incarnation"), "{}"),
            _or_dash(learner.get("seen_s_ago"), "{:.1f} s ago"),
            style="dim" if state in ("dead", "lost") else "",
        )
    return table


def _merges(status: Status) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("last merges", "fragment", "version", "learners", "quorum", "grace"):
        justify: JustifyMethod = "left" if name == "last merges" else "right"
        table.add_column(name, justify=justify, no_wrap=True, min_width=len(name))
    for m in (status.get("merges") or [])[-NUM_MERGES:][::-1]:
        alone = m.get("breadth", 0) <= 1 < status.get("live", 0)
        table.add_row(
            _ago(status, m["t"]),
            str(m.get("fragment", "")),
            str(m.get("version", "")),
            Text(str(m.get("breadth", "")), style="bold red" if alone else ""),
            _or_dash(m.get("quorum_s"), "{:.2f} s"),
            _or_dash(m.get("grace_s"), "{:.2f} s"),
        )
    return table


def _averages(status: Status) -> Table:
    """Gossip: what the hub took of all learners' parameters."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("last averages", no_wrap=True)
    for name in ("version", "learners"):
        table.add_column(name, justify="right", no_wrap=True)
    for m in (status.get("merges") or [])[-NUM_MERGES:][::-1]:
        table.add_row(_ago(status, m["t"]), str(m.get("version", "")), str(m.get("breadth", "")))
    return table


def _notes(status: Status) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("events", justify="right", no_wrap=True)
    table.add_column("")
    for note in (status.get("notes") or [])[-NUM_NOTES:]:
        table.add_row(Text(seconds(note["t"]), style="dim"), Text(str(note["text"])))
    return table


def _row(cells: Sequence[RenderableType], gap: int = 4) -> Table:
    grid = Table.grid(padding=(0, gap, 0, 0))
    grid.add_row(*cells)
    return grid


def _ago(status: Status, t: float) -> str:
    return f"{max(0.0, status.get('t_s', t) - t):.1f} s ago"


def _or_dash(value: Any, form: str, show: Callable[[Any], str] | None = None) -> str:
    if value is None:
        return "–"
    return show(value) if show is not None else form.format(value)
