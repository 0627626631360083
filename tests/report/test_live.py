"""The terminal view: full in a terminal, plain lines elsewhere, patient with missing keys."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from farflung.report.live import LiveView, plain_line, result_table, screen
from farflung.report.summary import summarise

STATUS: dict[str, Any] = {
    "phase": "training",
    "method": "decoupled",
    "t_s": 31.2,
    "tokens": 880_000,
    "budget_tokens": 1_900_000,
    "tokens_per_s": 31_200,
    "live": 3,
    "num_learners": 4,
    "bytes_up": 9_100_000,
    "bytes_down": 22_000_000,
    "eval": [{"tokens": 0, "loss": 4.2}, {"tokens": 800_000, "loss": 2.31}],
    "learners": [
        {"name": "learner-0", "state": "training", "step": 61, "loss": 2.2, "tokens_per_s": 8000.0,
         "incarnation": 1, "seen_s_ago": 0.2, "lead": 1},
        {"name": "learner-1", "state": "dead", "step": 40, "loss": None, "tokens_per_s": 0.0,
         "incarnation": 1, "seen_s_ago": 9.0, "lead": None},
    ],
    "merges": [{"t": 30.0, "fragment": 2, "version": 7, "breadth": 1, "grace_s": 0.21, "quorum_s": 0.1}],
    "waiting": ["fragment 2, round 9: 1 of 2 contributions"],
    "notes": [{"t": 20.0, "text": "learner-1 [kill]"}],
    "ledger": {"token_fragments": {"trained": 100, "merged": 90, "discarded": {}, "in_flight": 10}},
}  # fmt: skip


def shown(thing: Any, width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO(), record=True, force_terminal=True)
    console.print(thing)
    return console.export_text()


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_shows_progress_learners_merges_and_events(width: int) -> None:
    text = shown(screen(STATUS, width), width)
    for words in (
        "880k of 1.9M tokens (46 %)",
        "32.7 s left",
        "90 % merged",
        "● dead",
        "1.2 s ago",
        "waiting:",
    ):
        assert words in text
    assert "learner-1 [kill]" in text
    assert all(len(line.rstrip()) <= width for line in text.splitlines())


@pytest.mark.parametrize("missing", [*STATUS, None])
def test_a_missing_key_never_breaks_the_view(missing: str | None) -> None:
    status = {k: v for k, v in STATUS.items() if k != missing} if missing else {}
    assert shown(screen(status))
    assert plain_line(status)


GOSSIP = {"epoch": 3, "members": 6, "meetings": 110, "missed": {"late": 2, "deadline": 5}, "half_exchanges": 1,
          "distance": 1.0561}  # fmt: skip


def test_a_gossip_run_has_one_line_of_its_own() -> None:
    line = "epoch 3 (6 members), consensus distance 1.06, 110 meetings, 1 half exchange, 7 missed (deadline 5"
    status = {**STATUS, "gossip": GOSSIP}
    assert line in shown(screen(status))
    assert line in plain_line(status)
    assert "last averages" in shown(screen(status))
    assert "epoch" not in shown(screen(STATUS))


@pytest.mark.parametrize("missing", [*GOSSIP, None])
def test_a_missing_key_of_gossip_never_breaks_the_view(missing: str | None) -> None:
    gossip = {k: v for k, v in GOSSIP.items() if k != missing} if missing else {}
    assert shown(screen({**STATUS, "gossip": gossip}))
    assert plain_line({**STATUS, "gossip": {**gossip, "distance": None}})


def test_elsewhere_than_in_a_terminal_lines_come_now_and_then_and_notes_once() -> None:
    out, now = io.StringIO(), [0.0]
    console = Console(file=out, force_terminal=False, width=60)
    with LiveView(console, clock=lambda: now[0]) as view:
        for now[0] in (0.0, 1.0, 2.0, 6.0):
            view.update(STATUS)
    lines = out.getvalue().splitlines()
    assert len([line for line in lines if "tokens/s" in line]) == 2
    assert len([line for line in lines if "[kill]" in line]) == 1


def test_in_a_terminal_the_block_is_redrawn() -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, force_terminal=True, width=120)) as view:
        view.update(STATUS)
        view.close()
    assert "learner-0" in out.getvalue()


def test_the_closing_table_explains_its_figures(decoupled_dir: Path) -> None:
    text = shown(result_table(summarise(decoupled_dir, {"digest": "abc123"})))
    for words in ("3.947 → 1.724", "goodput", "killed / rejoined", "1 / 1", "exact", "abc123"):
        assert words in text


def test_the_closing_table_leaves_out_figures_that_it_lacks() -> None:
    text = shown(result_table({"method": "x", "goodput": 0.5}))
    assert "50.0 %" in text
    assert "uptime" not in text


def test_the_view_starts_without_torch_and_matplotlib() -> None:
    code = (
        "import sys, farflung.report.live; sys.exit(any(m in sys.modules for m in ('torch', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
