"""Pages of studies: what a reader sees, from rows alone."""

import doctest

import pytest
from studies.harness import Claim, row_of
from studies.run import NAMES, study_of

from studies import pages


def rows_of(study):
    """Rows as if every cell that is planned had run, and those planned after these."""
    rows = []
    for _ in range(6):
        known = [row["recipe"] for row in rows]
        for number, cell in enumerate(study.plan(rows)):
            if dict(cell.recipe) not in known:
                rows.append(row_of(cell, FIGURES | {"eval_loss": 2.5 + 0.01 * (number % 7)}))
    return rows


FIGURES = {
    "goodput": 0.9, "merged_share": 0.8, "discarded": {"late": 0.2}, "round_breadth": 3.0, "virtual_s": 900.0,
    "clipped_share": 0.5,
    "bytes_up": 10_000_000, "bytes_down": 20_000_000, "digest": "0", "eval_loss_start": 5.5, "accuracy": 0.8,
    "consensus_distance": 0.5, "workers_loss": 2.7,
    "curve": [(0.0, 0, 5.5), (400.0, 1000, 3.0), (900.0, 2000, 2.5)],
}  # fmt: skip


def test_examples_in_docstrings():
    assert doctest.testmod(pages) == (0, doctest.testmod(pages).attempted)


@pytest.mark.parametrize("name", NAMES)
def test_every_study_makes_claims_picture_and_half_a_page_of_its_rows(name):
    study = study_of(name)
    rows = rows_of(study)
    claims = study.claims(rows)
    assert claims
    assert all(isinstance(claim, Claim) for claim in claims)
    assert study.picture(rows).axes
    text = study.page(rows, claims)
    for part in ("**Question.**", "**Set-up.**", "**What it means.**", "**What it does not show.**"):
        assert part in text
    assert "TODO" not in text
    assert "![" in text and f"{name}.svg" in text
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    assert len(" ".join(prose).split()) < 450  # half a page
