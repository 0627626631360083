"""summary.json: what a run amounted to, in one flat object."""

from collections.abc import Sequence
from pathlib import Path

from farflung.report.figures import figures
from farflung.report.folder import Folder, read_folder
from farflung.report.history import Data, History
from farflung.report.meetings import gossip_summary
from farflung.report.traffic import rows_of, traffic_summary


def summarise(run_dir: Path, extra: Data | None = None) -> Data:
    """Make the contents of summary.json from a run folder, finished or interrupted.

    `extra` holds what only the driver knows (bytes_up, bytes_down, bytes_control, bytes_by, wall_s, digest,
    kills, outcome) and wins over what the tape says. Without it byte counts are those of the objects that the
    tape names, with their frame headers. bytes_by: a row for each learner, kind of object and fragment.

    Raises:
        UserError: not a run folder, or a damaged one.
    """
    return summary_of(read_folder(run_dir), extra)


def summary_of(folder: Folder, extra: Data | None = None) -> Data:
    """As `summarise`, for a folder that was read already. A gossip run has keys of its own (`gossip_summary`)."""
    history, numbers = folder.history, figures(folder.history)
    evals = history.evals
    tokens = ledger(history)
    summary: Data = {
        "method": folder.config.get("method") or history.policy.get("method"),
        "outcome": history.end_reason or "interrupted",
        "num_learners": numbers.num_learners,
        "steps": numbers.steps,
        "steps_of": numbers.steps_of,
        **tokens,
        "merged_share": share(tokens["token_fragments"]),
        "eval_loss_start": evals[0]["loss"] if evals else None,
        "eval_loss_final": evals[-1]["loss"] if evals else None,
        **_other_evals(evals),
        "goodput": numbers.goodput,
        "uptime": numbers.uptime,
        "bytes_up": numbers.bytes_up,
        "bytes_down": numbers.bytes_down,
        "bytes_control": None,
        "kills": numbers.kills,
        "rejoins": numbers.rejoins,
        "rejoins_own_state": numbers.rejoins_own_state,
        "rejoins_zero_state": numbers.rejoins_zero_state,
        "zero_state_reasons": numbers.zero_state_reasons,
        "refused": numbers.refused,
        "clipped": numbers.clipped,
        "waits": numbers.waits,
        "alarms": numbers.alarms,
        "merges": numbers.merges,
        "mean_merge_breadth": numbers.mean_merge_breadth,
        "narrow_merges": numbers.narrow_merges,
        "largest_merge_gap_s": numbers.largest_merge_gap_s,
        "median_merge_gap_s": numbers.median_merge_gap_s,
        "duration_s": numbers.duration_s,
        "wall_s": history.last_s,
        "digest": None,
        "truncated_lines": folder.truncated,
    }
    rows = (extra or {}).get("bytes_by") or rows_of(history)
    summary |= {"bytes_by": rows, "traffic": traffic_summary(history, rows)}
    if history.gossip is not None:
        summary |= gossip_summary(history, history.gossip)
    return summary | {k: v for k, v in (extra or {}).items() if v is not None}


def _other_evals(evals: Sequence[Data]) -> Data:
    """``eval_NAME_start`` and ``_final`` of what a task measures beside its loss, accuracy for instance."""
    ends = {"start": evals[0], "final": evals[-1]} if evals else {}
    return {
        f"eval_{name}_{end}": figure
        for end, record in ends.items()
        for name, figure in record.get("figures", {}).items()
    }


def ledger(history: History) -> Data:
    """The last ledger on the tape, checked; without one, what boundaries and merges say of it.

    `ledger_exact`: trained = tokens_trained x P = merged + sum(discarded) + in_flight. `ledger_at_s` is the
    time of the entry (None: reconstructed) and `tokens_reported` what the boundaries add up to.
    """
    notes = history.of_kind("ledger")
    if not notes:
        return _reconstructed(history)
    entry = notes[-1]
    fates = entry.data["token_fragments"]
    return {
        "tokens_trained": entry.data["tokens_trained"],
        "token_fragments": fates,
        "ledger_exact": exact(entry.data, history.policy.get("num_fragments")),
        "ledger_at_s": entry.t,
        "tokens_reported": history.tokens,
    }


def exact(entry: Data, num_fragments: int | None) -> bool:
    """Whether every token-fragment of a ledger entry has exactly one fate."""
    fates = entry["token_fragments"]
    known = fates["merged"] + sum(fates["discarded"].values()) + fates["in_flight"]
    whole = num_fragments is None or fates["trained"] == entry["tokens_trained"] * num_fragments
    return bool(whole and fates["trained"] == known)


def share(fates: Data) -> float:
    """merged / trained; 0 when nothing was trained."""
    return fates["merged"] / fates["trained"] if fates["trained"] else 0.0


def _reconstructed(history: History) -> Data:
    trained = history.tokens * int(history.policy.get("num_fragments", 1))
    merged = sum(m.tokens for m in history.merges)
    return {
        "tokens_trained": history.tokens,
        "token_fragments": {
            "trained": trained,
            "merged": merged,
            "discarded": {},
            "in_flight": 0,
            "unaccounted": trained - merged,
        },
        "ledger_exact": False,
        "ledger_at_s": None,
        "tokens_reported": history.tokens,
    }
