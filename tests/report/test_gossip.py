"""A gossip run is told in its own figures, and they are exact."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import fake_gossip
import pytest
from fake_gossip import VECTOR_BYTES

from farflung.methods.gossip import FIXED
from farflung.report import page, partners, pictures
from farflung.report.folder import Folder, read_folder
from farflung.report.gossip import Gossip, GossipFold
from farflung.report.history import History
from farflung.report.meetings import longest_wait_s, meetings
from farflung.report.page import render
from farflung.report.pictures import Frame
from farflung.report.rows import rows_for
from farflung.report.spans import alive
from farflung.report.story import story
from farflung.report.summary import summarise, summary_of
from farflung.tape import Record
from farflung.units import FRAME_BYTES


def gossip_of(folder: Folder) -> Gossip:
    assert folder.history.gossip is not None
    return folder.history.gossip


def test_a_meeting_is_counted_once_and_by_its_first_reason(gossip: Folder) -> None:
    found = [(m.pair, m.outcome, m.reason) for m in meetings(gossip_of(gossip))]
    assert found == [
        (("learner-0", "learner-1"), "mixed", ""),
        (("learner-1", "learner-2"), "missed", "deadline"),
        (("learner-0", "learner-2"), "half", "deadline"),
    ]


def test_the_summary_of_a_gossip_run_is_exact(gossip: Folder) -> None:
    summary = summary_of(gossip)
    expected = {
        "topology": "gossip",
        "epochs": 1,
        "meetings": {"total": 3, "mixed": 1, "missed": {"deadline": 1}},
        "half_exchanges": 1,
        "half_exchange_drift": 0.25,
        "consensus_distance": 1.0,
        "consensus_distances": [
            {"t": 6.0, "version": 1, "round": 0, "learners": 3, "distance": 4.0},
            {"t": 13.0, "version": 2, "round": 1, "learners": 3, "distance": 1.0},
        ],
        "workers_loss": {"mean": 2.5, "min": 2.0, "max": 3.0},
        "longest_wait_s": 2.0,
        "longest_deadline_s": 2.0,
        "bytes_per_exchange": VECTOR_BYTES,
        "bytes_between_partners": 3 * (VECTOR_BYTES + FRAME_BYTES),
        "merges": 9,  # rounds that ended
        "narrow_merges": 3,  # that missed every partner
        "mean_merge_breadth": (2 + 2 + 1 + 1 + 1 + 1 + 1 + 2 + 1) / 9,
        "largest_merge_gap_s": 2.5,  # from 7.0 to 9.5
        "eval_loss_final": 2.0,
        "tokens_trained": 180,
        "ledger_exact": True,
    }
    assert {key: summary[key] for key in expected} == expected
    json.dumps(summary, allow_nan=False)


def test_uptime_asks_for_one_learner(gossip: Folder) -> None:
    summary = summary_of(gossip)
    assert summary["uptime"] == pytest.approx((6.5 - 1.0 + 11.5 - 7.0) / 12.0)
    assert summary["goodput"] == pytest.approx(18 / (3 * 12.0))


def test_a_frozen_learner_does_not_wait_meanwhile(gossip: Folder) -> None:
    assert longest_wait_s(gossip.history, "learner-1") == pytest.approx(1.0)
    states = [s.state for s in alive(gossip.history, "learner-1") if 6.5 <= s.start_s < 9.5]
    assert states == ["waiting", "silent"]


def test_waits_for_partners_are_seen_though_no_trainer_reported_them(gossip: Folder) -> None:
    waits = [(s.start_s, s.end_s) for s in alive(gossip.history, "learner-2") if s.state == "waiting"]
    assert waits == [(5.0, 7.0), (9.0, 11.0)]


def test_a_wait_that_a_trainer_reported_counts_without_its_tape() -> None:
    fold = GossipFold()
    mixed = {"epoch": 1, "round": 0, "meetings": [], "correction": 0.0}
    fold.boundary(9.0, "a", 1, {"tokens": 0, "wait_s": 1.5, "mixed": mixed})
    assert longest_wait_s(History(gossip=fold.finish())) == 1.5


def test_a_learner_that_dies_at_a_rounds_end_stood_until_its_last_sign(
    gossip_dir: Path, tmp_path: Path
) -> None:
    lines = (gossip_dir / "tape" / "learner-2.jsonl").read_text().splitlines()
    cut = next(i for i, line in enumerate(lines) if '"meet","at_s":11.0' in line)
    run_dir = fake_gossip.folder(tmp_path / "run")
    (run_dir / "tape" / "learner-2.jsonl").write_text("\n".join(lines[: cut + 2]) + "\n")
    last = gossip_of(read_folder(run_dir)).stands[-1]
    assert (last.learner, last.start_s, last.end_s, last.ended) == ("learner-2", 9.0, 9.0, False)


def test_an_interrupted_run_has_merged_what_was_in_ended_rounds(tmp_path: Path) -> None:
    run = fake_gossip.gossip()
    run.records["syncer"] = [r for r in run.records["syncer"] if r[0] < 9.0]
    summary = summarise(run.write(tmp_path / "run"))
    assert summary["token_fragments"] == {
        "trained": 130, "merged": 100, "discarded": {}, "in_flight": 0, "unaccounted": 30,
    }  # fmt: skip


def test_bytes_are_told_apart_by_whom_they_go_to(gossip: Folder) -> None:
    moved = gossip.history.transfers
    assert sum(x.up for x in moved if x.partner) == 3 * (VECTOR_BYTES + FRAME_BYTES)
    assert sum(x.down for x in moved if x.partner) == 3 * (VECTOR_BYTES + FRAME_BYTES)
    assert summary_of(gossip)["bytes_up"] == 3 * (VECTOR_BYTES + FRAME_BYTES)


def test_bytes_that_a_learner_reported_count_only_where_its_tape_is_lacking() -> None:
    fold = GossipFold()
    for learner in ("a", "b"):
        mixed = {"epoch": 1, "round": 0, "meetings": [], "correction": 0.0, "bytes_up": 5, "bytes_down": 7}
        fold.boundary(9.0, learner, 1, {"mixed": mixed})
    fold.learner_side(Record(0.0, "a", 0, "header", {}))
    assert [(x.learner, x.up, x.down) for x in fold.finish().moved] == [("b", 5, 7)]


@pytest.mark.parametrize("draw", [partners.consensus, partners.who_met, partners.traffic, pictures.timeline])
def test_a_picture_of_partners_is_one_svg_element(draw, gossip: Folder) -> None:  # type: ignore[no-untyped-def]
    for history in (gossip.history, History(), History(gossip=Gossip())):
        text = draw(history, Frame.around([history]), "x")
        assert ET.fromstring(text).tag.endswith("svg")


def test_who_met_whom_shows_the_missed_below_the_diagonal(gossip: Folder) -> None:
    counts = partners._counts(meetings(gossip_of(gossip)), {f"learner-{i}": i for i in range(3)}, mixed=True)
    assert counts == {(1, 0): 1}  # (column, row)
    counts = partners._counts(meetings(gossip_of(gossip)), {f"learner-{i}": i for i in range(3)}, mixed=False)
    assert counts == {(1, 2): 1, (0, 2): 1}


def test_a_gossip_page_speaks_of_rounds_and_partners(gossip_dir: Path) -> None:
    text = render(gossip_dir)
    for words in (
        "9 rounds ended, 3 meetings",
        "at least one learner trained",
        "missed a partner",
        "1, drift 0.25",
        "2.0 s of 2.0 s",
        "2.000 – 3.000",
        "half exchange: in round 2",
    ):
        assert words in text, words
    for words in ("learners per merge", "quorum", "longest without a merge", "grace_gamma"):
        assert words not in text, words


def test_a_hub_page_and_its_rows_know_nothing_of_gossip(decoupled_dir: Path) -> None:
    text = render(decoupled_dir)
    for words in ("partner", "gossip", "consensus", "gathers"):
        assert words not in text, words


def test_gossip_beside_a_hub_run_dashes_what_one_of_them_lacks(gossip_dir: Path, decoupled_dir: Path) -> None:
    text = render([gossip_dir, decoupled_dir])
    assert re.search(r"meetings mixed<small>.*?</small></th><td>1 of 3</td><td>–</td>", text)
    assert re.search(r"learners per merge<small>.*?</small></th><td>–</td>", text)
    assert "(gossip: of the time at least one learner trained)" in text


def test_the_story_tells_of_epochs_that_change(tmp_path: Path) -> None:
    run = fake_gossip.gossip()
    run.note(10.0, "epoch", number=2, round=3, members=["learner-0", "learner-2"])
    texts = [line.text for line in story(read_folder(run.write(tmp_path / "run")).history)]
    assert "epoch 2: 2 learners may meet (learner-1 out)" in texts


def test_hidden_policy_fields_are_those_that_gossip_methods_refuse() -> None:
    assert set(page.HUB_FIELDS) == set(FIXED)


def test_rows_are_named_for_the_runs_they_stand_for() -> None:
    names = {row.key: name for row, name, _ in rows_for([{"topology": "gossip"}])}
    assert names["largest_merge_gap_s"] == "longest round gap"
    assert "mean_merge_breadth" not in names
    assert "meetings" not in {row.key for row, _, _ in rows_for([{}])}
