"""What is written when a run is over: the merged tape, summary.json, report.html."""

import json
from pathlib import Path

from farflung import tape
from farflung.report.history import Data
from farflung.report.page import render
from farflung.report.summary import summarise


def close_run(run_dir: Path, results: Data) -> Data:
    """Write them all; returns the summary. `results` holds what only the driver knows."""
    tape.write_merged(run_dir)
    summary = summarise(run_dir, results)
    tape.write_atomically(run_dir / tape.SUMMARY, json.dumps(summary, indent=2).encode())
    tape.write_atomically(run_dir / tape.REPORT, render(run_dir).encode())
    return summary
