"""Traffic of a run in summary and page: ratios against sums by hand, rows from the tape."""

from pathlib import Path
from typing import Any

import fake_gossip
import fake_run
import pytest

from farflung.report.folder import Folder
from farflung.report.page import render
from farflung.report.results import result_table
from farflung.report.summary import summarise, summary_of
from farflung.report.traffic_page import section_of
from farflung.units import FRAME_BYTES

DENSE = 4 * 50_000  # of each of four fragments
VALUE, PAYLOAD = DENSE + FRAME_BYTES, 100_000 + FRAME_BYTES


@pytest.fixture(scope="module")
def summary(decoupled: Folder) -> dict[str, Any]:
    return summary_of(decoupled)


def test_rows_add_up_to_the_totals(summary: dict[str, Any]) -> None:
    rows = summary["bytes_by"]
    assert sum(row["up"] for row in rows) == summary["bytes_up"]
    assert sum(row["down"] for row in rows) == summary["bytes_down"]
    assert {row["kind"] for row in rows} == {"contribution", "version"}


def test_a_round_leaves_out_what_joiners_install(summary: dict[str, Any]) -> None:
    fragments, rounds = summary["traffic"]["fragments"], summary["traffic"]["rounds"]
    assert rounds["up"] == PAYLOAD * sum(f["contributions"] for f in fragments) == summary["bytes_up"]
    assert rounds["down"] == VALUE * sum(f["versions"] for f in fragments)
    assert summary["bytes_down"] - rounds["down"] == 5 * 4 * VALUE  # four births and a rejoin


def test_ratios_are_those_of_sums_by_hand(summary: dict[str, Any], decoupled: Folder) -> None:
    times, rounds = summary["traffic"]["times_fewer"], summary["traffic"]["rounds"]
    assert times["diloco"]["up"] == pytest.approx(VALUE / PAYLOAD) and times["diloco"]["down"] == 1.0
    ring = sum(2 * (m.breadth - 1) * DENSE for m in decoupled.history.merges)
    assert times["ring"]["up"] == pytest.approx(ring / rounds["up"])
    steps = summary["steps"] * 2 * 3 / 4 * 4 * DENSE
    assert times["data_parallel"]["down"] == pytest.approx(steps / rounds["down"])


def test_a_round_through_a_hub_is_predicted_for_other_numbers_of_learners(summary: dict[str, Any]) -> None:
    found = summary["traffic"]["by_num_learners"]
    assert [f["num_learners"] for f in found] == [2, 4, 8, 16, 64]
    for f in found:
        M = f["num_learners"]
        assert (f["up"], f["down"], f["all"]) == (4 * PAYLOAD, 4 * VALUE, M * 4 * (PAYLOAD + VALUE))
        assert f["times_fewer"]["ring"] == pytest.approx(2 * (M - 1) / M * DENSE / PAYLOAD)
        assert f["times_fewer"]["data_parallel"] == pytest.approx(8 * f["times_fewer"]["ring"])


def test_gossip_counts_partners_vectors_as_rounds(gossip: Folder) -> None:
    figures = summary_of(gossip)["traffic"]
    vector = fake_gossip.VECTOR_BYTES + FRAME_BYTES
    assert figures["rounds"] == {"up": 3 * vector, "down": 3 * vector}
    assert figures["references"]["ring"]["up"] == pytest.approx(9 * 4 / 3 * 4 * 350)
    assert figures["by_num_learners"][0] | {"times_fewer": {}} == {
        "num_learners": 2, "up": vector, "down": vector, "ring": 1400, "all": 2 * vector, "times_fewer": {},
    }  # fmt: skip


def test_what_the_transport_counted_wins(decoupled_dir: Path) -> None:
    rows = [{"learner": "learner-0", "kind": "contribution", "fragment": 1, "up": 7 * PAYLOAD, "down": 0}]
    summary = summarise(decoupled_dir, {"bytes_by": rows})
    assert summary["bytes_by"] == rows and summary["traffic"]["rounds"]["up"] == 7 * PAYLOAD
    assert [f["up"] for f in summary["traffic"]["fragments"]] == [0, 7 * PAYLOAD, 0, 0]


def test_the_page_tells_by_learner_by_fragment_and_over_learners(decoupled_dir: Path) -> None:
    page = render(decoupled_dir)
    for words in ("<h2>Traffic</h2>", "By learner", "By fragment", "ring all-reduce", "than data-parallel",
                  "With other numbers of learners", "Every learner and fragment"):  # fmt: skip
        assert words in page


def test_a_run_that_sent_nothing_has_a_section_and_a_dash(tmp_path: Path) -> None:
    summary = summarise(fake_run.Run("decoupled").write(tmp_path / "run"))
    assert summary["traffic"] is None and summary["bytes_by"] == []
    assert section_of(summary) and result_table(summary).row_count > 5


def test_old_summaries_without_traffic_are_still_shown(summary: dict[str, Any]) -> None:
    old = {key: value for key, value in summary.items() if key not in ("traffic", "bytes_by")}
    assert result_table(old).row_count == result_table(summary).row_count - 1
