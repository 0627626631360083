"""The tape: what every machine saw and did, one JSON line each; and the names inside a run folder.

A segment `tape/NODE.jsonl` begins with a header (schema, node, machine and what it was built from), then
holds every event before the actions that it caused. A line is ``{"t", "node", "seq", "kind", "data"}``
with kind "header", "event" or "action"; t is the machine's clock in seconds since the run's start.
A last line may be cut off (the process was killed while writing): it is skipped and counted.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

SCHEMA = 1

CONFIG = "config.json"
TAPE = "tape.jsonl"
TAPE_DIR = "tape"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
REPORT = "report.html"
CHECKPOINTS = "checkpoints"
MODEL = "model.safetensors"
LOGS = "logs"


@dataclass(frozen=True)
class Record:
    t: float
    node: str
    seq: int
    kind: str
    data: dict[str, Any]

    @property
    def type(self) -> str:
        """Name of the event or action, e.g. ``MergeDone``."""
        return str(self.data.get("type", ""))


class Stream(Protocol):
    """Where lines go: a text file, or the like."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> None: ...


class TapeWriter:
    """Appends records of one machine to a text stream; flushed after every event with its actions."""

    def __init__(self, stream: Stream, node: str):
        self.stream, self.node, self.seq = stream, node, 0

    def write(self, t: float, kind: str, json_text: str) -> None:
        """`json_text` is the event or action, already encoded as one JSON object."""
        self.stream.write(
            f'{{"t":{t!r},"node":{json.dumps(self.node)},"seq":{self.seq},"kind":"{kind}","data":{json_text}}}\n'
        )
        self.seq += 1

    def flush(self) -> None:
        self.stream.flush()


@dataclass
class Segment:
    """One machine's records. `truncated` counts lines that could not be read at the end (0 or 1)."""

    records: list[Record]
    truncated: int = 0


def read_segment(path: Path) -> Segment:
    """Read a tape file. Raises ValueError naming file and line for damage anywhere but in the last line."""
    segment = Segment([])
    lines = path.read_bytes().split(b"\n")
    last = len(lines) - 1
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            raw = json.loads(line)
            segment.records.append(Record(raw["t"], raw["node"], raw["seq"], raw["kind"], raw["data"]))
        except (ValueError, KeyError, TypeError) as error:
            if number != last:
                raise ValueError(
                    f"{path}: line {number + 1} is damaged ({error}); the tape is unusable"
                ) from None
            segment.truncated += 1
    return segment


def merge(segments: Iterable[Segment]) -> list[Record]:
    """All records by (time, node, sequence)."""
    return sorted((r for s in segments for r in s.records), key=lambda r: (r.t, r.node, r.seq))


def read_run(run_dir: Path) -> Iterator[Record]:
    """The records of a run folder: `tape.jsonl` if the run ended, else its segments merged."""
    whole = run_dir / TAPE
    if whole.exists():
        yield from read_segment(whole).records
    else:
        yield from merge(read_segment(p) for p in sorted((run_dir / TAPE_DIR).glob("*.jsonl")))


_PLACE = re.compile(rb'\{"t":([^,]+),"node":("(?:[^"\\\\]|\\\\.)*"),"seq":(\d+),"kind":')


def write_merged(run_dir: Path) -> int:
    """Write `tape.jsonl` from the segments, line by line as they are; returns how many were cut off.

    Raises ValueError for a line before the last that is not a record.
    """
    lines: list[tuple[float, bytes, int, bytes]] = []
    truncated = 0
    for path in sorted((run_dir / TAPE_DIR).glob("*.jsonl")):
        *whole, rest = path.read_bytes().split(b"\n")
        truncated += bool(rest)
        for number, line in enumerate(whole, 1):
            place = _PLACE.match(line)
            if place is None:
                raise ValueError(f"{path}: line {number} is no tape record; the tape is unusable")
            lines.append((float(place[1]), place[2], int(place[3]), line))
    lines.sort(key=lambda entry: entry[:3])
    write_atomically(run_dir / TAPE, b"".join(line + b"\n" for *_, line in lines))
    return truncated


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    partial.replace(path)


def free_segment(run_dir: Path, node: str, first: int = 1) -> Path:
    """Where a new incarnation of a node writes: ``tape/NODE.jsonl`` or the first free ``tape/NODE.2.jsonl``..."""
    folder = run_dir / TAPE_DIR
    number = first
    while True:
        path = folder / (f"{node}.jsonl" if number == 1 else f"{node}.{number}.jsonl")
        if not path.exists():
            return path
        number += 1
