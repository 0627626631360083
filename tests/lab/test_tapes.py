"""Tapes from elsewhere: one of today that must stay readable, and damaged or foreign ones that are refused."""

import gzip
import json
import sys
from pathlib import Path

import pytest

from farflung import cli, tape
from farflung.report.folder import read_folder
from farflung.report.summary import summarise
from farflung.testing.tapes import replay_run

STORED = Path(__file__).parents[1] / "data" / "tape-v1"  # its recipe.toml says how it was made


@pytest.fixture
def copy(tmp_path):
    """The stored run, unpacked: a run folder that may be damaged."""
    (tmp_path / "run" / tape.TAPE_DIR).mkdir(parents=True)
    for path in STORED.rglob("*.json*"):
        target = tmp_path / "run" / path.relative_to(STORED)
        if path.suffix == ".gz":
            target.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        else:
            target.write_bytes(path.read_bytes())
    return tmp_path / "run"


def test_a_stored_tape_of_schema_1_replays_to_the_same_actions(copy):
    verdicts = replay_run(copy)
    assert [v.segment for v in verdicts] == [
        "learner-0.jsonl", "learner-1.2.jsonl", "learner-1.jsonl", "syncer.jsonl",
    ]  # fmt: skip
    assert all(v.same for v in verdicts), "\n".join(map(str, verdicts))


def test_a_stored_tape_of_schema_1_is_reported_as_it_was(copy):
    stored = read_folder(copy).summary
    now = summarise(copy)
    for key in ("merges", "rejoins", "kills", "steps", "goodput", "token_fragments", "ledger_exact"):
        assert now[key] == stored[key], key
    assert stored["rejoins"] == 1


def damage(run_dir, change, name="syncer.jsonl"):
    path = run_dir / tape.TAPE_DIR / name
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(change(lines)))


def edited(line, **changes):
    return json.dumps({**json.loads(line), **changes}) + "\n"


def reschemed(line):
    raw = json.loads(line)
    return edited(line, data={**raw["data"], "schema": 2})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:5], "{not json\n", *lines[6:]], "line 6 is damaged"),
        (lambda lines: [*lines[:5], *lines[6:]], "after seq 4 comes"),
        (lambda lines: lines[1:], "no header in the first line"),
        (lambda lines: [], "no header in the first line"),
        (lambda lines: [reschemed(lines[0]), *lines[1:]], "tape schema 2, this farflung reads 1"),
        (
            lambda lines: [edited(lines[0], data={"schema": 1, "machine": "toaster"}), *lines[1:]],
            "toaster has no machine",
        ),
        (
            lambda lines: [lines[0], edited(lines[1], data={"type": "Toasted"}), *lines[2:]],
            "not an event of this farflung's machines",
        ),
    ],
)
def test_a_damaged_or_foreign_tape_is_one_line_and_exit_code_2(copy, change, message, monkeypatch, capsys):
    damage(copy, change)
    monkeypatch.setattr(sys, "argv", ["farflung", "replay", str(copy)])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    out, err = capsys.readouterr()
    assert (exit.value.code, out, err.count("\n")) == (2, "", 1), err
    assert message in err


def test_a_changed_decision_is_found_and_named(copy):
    def other_version(lines):
        (at, *_) = [i for i, line in enumerate(lines) if '"type":"Merge"' in line]
        return [*lines[:at], lines[at].replace('"version":1', '"version":7'), *lines[at + 1 :]]

    damage(copy, other_version)
    verdict = next(v for v in replay_run(copy) if v.segment == "syncer.jsonl")
    assert not verdict.same and '"version":7' in str(verdict)


def test_an_event_that_no_longer_fits_is_a_difference_and_no_crash(copy):
    def other_fragment(lines):
        (at, *_) = [i for i, line in enumerate(lines) if '"type":"MergeDone"' in line]
        return [*lines[:at], lines[at].replace('"fragment":0', '"fragment":1'), *lines[at + 1 :]]

    damage(copy, other_fragment)
    assert not next(v for v in replay_run(copy) if v.segment == "syncer.jsonl").same


def test_a_line_that_was_cut_off_is_counted(copy):
    damage(copy, lambda lines: [*lines[:-1], lines[-1][:20]], "learner-0.jsonl")
    verdict = next(v for v in replay_run(copy) if v.segment == "learner-0.jsonl")
    assert verdict.same and verdict.truncated == 1
