"""summary.json of finished, interrupted and damaged runs."""

import json
from pathlib import Path

import fake_run
import pytest

from farflung.errors import UserError
from farflung.report.history import History, Note
from farflung.report.summary import ledger, summarise
from farflung.units import FRAME_BYTES

PROMISED = [
    "method",
    "num_learners",
    "steps",
    "tokens_trained",
    "token_fragments",
    "eval_loss_start",
    "eval_loss_final",
    "goodput",
    "uptime",
    "merged_share",
    "bytes_up",
    "bytes_down",
    "bytes_control",
    "bytes_by",
    "traffic",
    "kills",
    "rejoins",
    "rejoins_own_state",
    "rejoins_zero_state",
    "zero_state_reasons",
    "refused",
    "clipped",
    "merges",
    "mean_merge_breadth",
    "largest_merge_gap_s",
    "median_merge_gap_s",
    "wall_s",
    "digest",
    "ledger_exact",
]


def test_a_summary_has_every_promised_key_and_is_json(decoupled_dir: Path) -> None:
    summary = summarise(decoupled_dir, {"digest": "d"})
    assert [key for key in PROMISED if key not in summary] == []
    json.dumps(summary, allow_nan=False)


def test_the_summary_of_a_hub_run_has_no_key_and_no_figure_of_gossip(
    decoupled_dir: Path, diloco_dir: Path
) -> None:
    keys = {"outcome", "steps_of", "ledger_at_s", "tokens_reported", "waits", "alarms", "narrow_merges"}
    keys |= {"duration_s", "truncated_lines", *PROMISED}
    names = ("steps", "merges", "mean_merge_breadth", "goodput", "uptime", "largest_merge_gap_s", "bytes_up")
    expected = [
        (421, 55, 208 / 55, 0.930910, 0.979724, 1.7697, 19_400_000 + 194 * FRAME_BYTES),
        (473, 15, 59 / 15, 0.801151, 0.818428, 13.1, 5_900_000 + 59 * FRAME_BYTES),
    ]
    for run_dir, figures in zip((decoupled_dir, diloco_dir), expected, strict=True):
        summary = summarise(run_dir)
        assert set(summary) == keys
        assert [summary[name] for name in names] == pytest.approx(figures, rel=1e-5)


def test_what_the_driver_knows_wins_over_the_tape(decoupled_dir: Path) -> None:
    summary = summarise(
        decoupled_dir, {"bytes_up": 7, "kills": 3, "outcome": "suspended", "bytes_down": None}
    )
    assert (summary["bytes_up"], summary["kills"], summary["outcome"]) == (7, 3, "suspended")
    assert summary["bytes_down"] > 0


def test_an_exact_ledger_is_called_exact(decoupled_dir: Path) -> None:
    summary = summarise(decoupled_dir)
    assert summary["ledger_exact"]
    assert summary["tokens_trained"] == summary["tokens_reported"]


@pytest.mark.parametrize("field", ["merged", "in_flight", "trained"])
def test_a_ledger_that_is_off_by_one_is_not_exact(field: str) -> None:
    fates = {"trained": 40, "merged": 30, "discarded": {"late": 6}, "in_flight": 4}
    policy = {"num_fragments": 4}
    note = {"tokens_trained": 10, "token_fragments": fates}
    assert ledger(History(policy=policy, notes=[Note(1.0, "ledger", note)]))["ledger_exact"]
    fates[field] += 1  # type: ignore[operator]
    assert not ledger(History(policy=policy, notes=[Note(1.0, "ledger", note)]))["ledger_exact"]


def test_an_interrupted_run_says_what_is_unaccounted(tmp_path: Path) -> None:
    run = fake_run.decoupled(ledger=False)
    run.records = [r for r in run.records if r[0] < 30]
    run_dir = run.write(tmp_path / "run")
    tape = run_dir / "tape" / "syncer.jsonl"
    tape.write_bytes(tape.read_bytes()[:-20])
    with (run_dir / "metrics.jsonl").open("a") as out:
        out.write('{"t": 31, "ki')
    summary = summarise(run_dir)
    assert summary["outcome"] == "interrupted"
    assert summary["truncated_lines"] == 2
    assert not summary["ledger_exact"]
    fates = summary["token_fragments"]
    assert fates["trained"] == fates["merged"] + fates["unaccounted"] == summary["tokens_trained"] * 4


def test_a_run_that_died_before_its_first_step_has_a_summary(tmp_path: Path) -> None:
    run = fake_run.Run("decoupled")
    summary = summarise(run.write(tmp_path / "run"))
    assert (summary["steps"], summary["goodput"], summary["eval_loss_final"]) == (0, 0.0, None)


def test_a_folder_without_a_tape_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        summarise(tmp_path)


def test_damage_in_the_middle_of_a_tape_is_refused_by_line(tmp_path: Path) -> None:
    run_dir = fake_run.folder(tmp_path / "run")
    tape = run_dir / "tape" / "syncer.jsonl"
    lines = tape.read_text().split("\n")
    lines[5] = lines[5][:10]
    tape.write_text("\n".join(lines))
    with pytest.raises(UserError, match="line 6"):
        summarise(run_dir)
