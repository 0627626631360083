"""A run folder, read: whatever of it exists. Interrupted runs are read like finished ones."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farflung import tape
from farflung.errors import UserError
from farflung.report.history import Data, History, read_history


@dataclass
class Folder:
    """`summary` is empty until the run ended; `truncated` counts lines that were cut off while written."""

    name: str
    config: Data
    history: History
    summary: Data
    truncated: int = 0


def read_folder(run_dir: Path) -> Folder:
    """Read config, tape, metrics and summary of a run.

    Raises:
        UserError: there is no tape in this folder, or it is damaged before its last line.
    """
    records, truncated = _read_tape(run_dir)
    metrics, cut = read_lines(run_dir / tape.METRICS)
    return Folder(
        name=run_dir.resolve().name,
        config=_read_object(run_dir / tape.CONFIG),
        history=read_history(records, metrics),
        summary=_read_object(run_dir / tape.SUMMARY),
        truncated=truncated + cut,
    )


def _read_tape(run_dir: Path) -> tuple[list[tape.Record], int]:
    whole = run_dir / tape.TAPE
    paths = [whole] if whole.exists() else sorted((run_dir / tape.TAPE_DIR).glob("*.jsonl"))
    if not paths:
        raise UserError(f"{run_dir}: no {tape.TAPE} and no {tape.TAPE_DIR}/ here: not a run folder")
    try:
        segments = [tape.read_segment(path) for path in paths]
    except ValueError as error:
        raise UserError(str(error)) from None
    return tape.merge(segments), sum(s.truncated for s in segments)


def read_lines(path: Path) -> tuple[list[Data], int]:
    """JSON objects, one a line, and how many lines (0 or 1) at the end were cut off. Absent: nothing.

    Raises:
        UserError: a line before the last is damaged.
    """
    if not path.exists():
        return [], 0
    lines = [line for line in path.read_bytes().split(b"\n") if line]
    out: list[Data] = []
    for number, line in enumerate(lines, 1):
        try:
            out.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise UserError(f"{path}: line {number} is not JSON") from None
            return out, 1
    return out, 0


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    return value if isinstance(value, dict) else {}
