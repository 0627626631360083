"""Losses come from studies: every figure stands on its page, and what no study measured is not claimed."""

from pathlib import Path

import pytest

from farflung.methods import METHODS
from farflung.plan import quality as q
from farflung.plan.candidate import Candidate

PAGES = Path(__file__).parents[2] / "docs" / "results"
TABLES = [q.CODEC, q.DOWNLINK, q.OVERWRITE, q.MIX, q.QUORUM]


@pytest.mark.parametrize("measured", [m for table in TABLES for m in table.values()], ids=lambda m: m.what)
def test_a_figure_stands_on_its_page(measured: q.Measured) -> None:
    page = (PAGES / f"{measured.study}.md").read_text()
    assert measured.figure in page
    assert (
        measured.figure.startswith(f"{measured.percent:+g} %")
        or f"{measured.percent:+.2f} %" in measured.figure
    )


def test_losses_by_h_stand_on_their_page() -> None:
    page = (PAGES / "gossip_local_steps.md").read_text()
    for row, table in (("diloco", q.DILOCO), ("gasloc V2", q.GASLOC)):
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {row} |"))
        assert [float(line.split("|")[n]) for n in (3, 6, 9)] == list(table.values())


def of(method: str, learners: int = 8, **options: object) -> q.Quality:
    return q.quality(Candidate(learners=learners, policy=METHODS[method](**options).policy))


def test_what_nobody_measured_is_said() -> None:
    assert of("diloco", sync_every_steps=500).text == "?"
    assert of("sparseloco").unknown == ("sparseloco: not measured",)
    assert of("diloco", sync_every_steps=10, codec="top64-2bit-12bit").unknown
    pair = of("diloco", sync_every_steps=10, codec="bf16", downlink_codec="int4")
    assert pair.unknown == ("bf16 up, int4 down: not measured",)
    assert of("decoupled", quorum=3).unknown == ("K = 3 of 8: not measured",)


def test_parts_are_told_one_by_one() -> None:
    found = of("decoupled", sync_every_steps=100, num_fragments=24, codec="int4")
    assert [part.what for part in found.parts] == [
        "H = 100, of diloco", "int4", "tau = 2, overwrite", "K = 1 with grace",
    ]  # fmt: skip
    assert found.percent == pytest.approx(sum(part.percent for part in found.parts))


def test_the_base_costs_nothing() -> None:
    found = of("diloco", sync_every_steps=10)
    assert not found.parts and not found.unknown and found.text == "+0.0 %"
