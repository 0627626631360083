"""Pictures and page: well-formed, self-contained, deterministic, complete."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import fake_run
import pytest
from fake_run import END_S

from farflung.errors import UserError
from farflung.report import pictures
from farflung.report.canvas import new_figure
from farflung.report.drawing import tag_inside
from farflung.report.folder import Folder
from farflung.report.history import History
from farflung.report.page import render
from farflung.report.pictures import Frame

DRAWN = [
    pictures.timeline,
    pictures.timeline_narrow,
    pictures.loss_by_tokens,
    pictures.loss_by_time,
    pictures.breadth,
    pictures.traffic,
]


@pytest.mark.parametrize("draw", DRAWN)
def test_a_picture_is_one_svg_element(draw, decoupled: Folder) -> None:  # type: ignore[no-untyped-def]
    text = draw(decoupled.history, Frame.around([decoupled.history]), "x")
    assert ET.fromstring(text).tag.endswith("svg")
    assert "var(--blue" in text


@pytest.mark.parametrize("draw", DRAWN)
def test_a_picture_of_nothing_is_still_a_picture(draw) -> None:  # type: ignore[no-untyped-def]
    empty = History()
    assert ET.fromstring(draw(empty, Frame.around([empty]), "x")) is not None


def test_a_picture_depends_on_nothing_but_the_run(decoupled: Folder) -> None:
    frame = Frame.around([decoupled.history])
    assert pictures.breadth(decoupled.history, frame) == pictures.breadth(decoupled.history, frame)


def test_a_long_run_does_not_make_a_large_picture(decoupled: Folder) -> None:
    history = decoupled.history
    many = [replace(m, t=m.t + i / 1000) for m in history.merges for i in range(400)]
    text = pictures.timeline(replace(history, merges=many), Frame.around([history]))
    assert len(text) < 600_000


def test_the_ledger_names_every_fate(decoupled: Folder) -> None:
    fates = {"trained": 100, "merged": 80, "discarded": {"learner_lost": 5, "late": 5}, "in_flight": 10}
    text = pictures.ledger(fates)
    for words in ("merged 80.0 %", "learner lost 5.0 %", "late 5.0 %", "in flight 10.0 %"):
        assert words in text


def test_a_page_needs_nothing_from_outside(decoupled_dir: Path) -> None:
    page = render(decoupled_dir)
    links = [x for x in re.findall(r"https?://[^\"' <>)]+", page) if not x.startswith("http://www.w3.org/")]
    assert links == []
    assert not re.search(r"<(script|link|img)\b", page)


def test_a_page_tells_headline_story_tables_and_recipe(decoupled_dir: Path) -> None:
    page = render(decoupled_dir)
    for words in (
        "goodput",
        "kill (fault plan)",
        "The ledger is exact",
        "learner-3",
        "fingerprint",
        "outer_lr",
    ):
        assert words in page


def test_ids_are_unique_within_a_page(decoupled_dir: Path, diloco_dir: Path) -> None:
    ids = re.findall(r'\bid="([^"]+)"', render([decoupled_dir, diloco_dir]))
    assert len(ids) == len(set(ids))


def test_runs_next_to_each_other_show_the_merge_gap_as_bars(decoupled_dir: Path, diloco_dir: Path) -> None:
    page = render([decoupled_dir, diloco_dir])
    assert re.search(r"longest merge gap.*?bar.*?1\.8 s.*?bar bad.*?13\.1 s", page)
    assert page.index("Longest time in which nothing was merged") < page.index("<table")


def test_two_runs_of_one_method_get_different_names(decoupled_dir: Path, tmp_path: Path) -> None:
    other = fake_run.folder(tmp_path / "other")
    page = render([decoupled_dir, other])
    assert "a and other" in page


def test_text_from_outside_is_escaped(tmp_path: Path) -> None:
    run = fake_run.decoupled()
    run.note(16.0, "refused", learner="<script>", what="join", reason="token", detail="<b>")
    page = render(run.write(tmp_path / "run"))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_no_run_is_refused() -> None:
    with pytest.raises(UserError, match="at least one"):
        render([])


def test_the_last_evaluation_lies_within_the_time_axis(decoupled: Folder) -> None:
    evals = [*decoupled.history.metrics, {"t": END_S + 5, "kind": "eval", "tokens": 1, "loss": 2.0}]
    history = replace(decoupled.history, metrics=evals)
    frame = Frame.around([history])
    assert (frame.end_s, frame.evals_end_s) == (history.end_s, END_S + 5)


@pytest.mark.parametrize(
    ("x", "left", "side"), [(10, True, "left"), (80, True, "right"), (90, False, "right"), (1, False, "left")]
)
def test_a_label_stands_where_it_fits(x: float, left: bool, side: str) -> None:
    _, axes = new_figure()
    axes.set_xlim(0, 100)
    tag_inside(axes, (x, 0.5), "training, each learner", "#000000", dy=0, dx=10, left=left)
    assert axes.texts[0].get_horizontalalignment() == side
