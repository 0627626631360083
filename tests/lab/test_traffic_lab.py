"""The lab counts what a transport would: payloads by their formula, and a header each; the tape says the same."""

from typing import Any

import pytest
from lab_helpers import run, small

from farflung.core.traffic import framed_bytes
from farflung.report.folder import read_folder
from farflung.report.traffic import rows_of

NUM_PARAMETERS = 34_976  # of scale micro
PAYLOADS = {  # K chunks of 4096, k of each in bits of value and position
    "sparseloco": ("top512-bf16-12bit", 9 * 512 * (16 + 12) // 8),
    "dct_momentum": ("dct-top128-fp32-12bit", 9 * 128 * (32 + 12) // 8),
}


def summary_and_tape(tmp_path, method: str, **policy: Any):
    policy = {"sync_every_steps": 4, "lease_s": 2.0, "codec": PAYLOADS[method][0], **policy}
    run_dir = tmp_path / "run"
    summary = run(small(method=method, policy=policy, faults=[], evals=0), run_dir)
    return summary, read_folder(run_dir).history


@pytest.mark.parametrize("method", PAYLOADS)
def test_bytes_up_are_payloads_by_their_formula_with_a_header_each(method, tmp_path):
    summary, history = summary_and_tape(tmp_path, method)
    framed, rounds = framed_bytes(PAYLOADS[method][1]), summary["traffic"]["rounds"]
    kind = "contribution" if method == "sparseloco" else "offer"
    sent = [x for x in history.transfers if x.kind == kind and x.up]
    assert rounds["up"] == sum(row["up"] for row in summary["bytes_by"] if row["kind"] == kind)
    cut = rounds["up"] - len(sent) * framed  # what had passed of vectors when the run ended
    assert sent and (cut == 0 if method == "sparseloco" else 0 <= cut < 3 * framed)
    assert summary["traffic"]["fragments"][0]["dense_bytes"] == 4 * NUM_PARAMETERS


@pytest.mark.parametrize(
    "policy", [{}, {"pace": "free", "quorum": 1, "num_fragments": 4, "overlap_steps": 1}]
)
def test_without_faults_the_tape_tells_what_was_counted(policy, tmp_path):
    """But for what had passed of uploads that the end of the budget cut: only the transport sees that."""
    summary, history = summary_and_tape(tmp_path, "sparseloco", **policy)
    told, counted = rows_of(history), summary["bytes_by"]
    payload = framed_bytes(PAYLOADS["sparseloco"][1])
    for tape_row, row in zip(told, counted, strict=True):
        cut = row["up"] - tape_row["up"]
        assert row == {**tape_row, "up": tape_row["up"] + cut}
        assert cut == 0 or (row["kind"] == "contribution" and 0 < cut < payload)
    assert told == counted or policy  # in lockstep nothing is cut here
    assert sum(row["up"] for row in summary["bytes_by"]) == summary["bytes_up"]
    assert sum(row["down"] for row in summary["bytes_by"]) == summary["bytes_down"]
