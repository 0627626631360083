"""The studies' harness: cells are kept as they finish, and a study goes on where it was."""

import json

import pytest
from matplotlib.figure import Figure
from studies.harness import Cell, Claim, Study, base_recipe, load, paired, run, save
from studies.measure import measure
from studies.run import NAMES, study_of

from farflung.recipe import make_recipe
from studies import harness

SEEDS = (1, 2)
STEPS = 30


def tiny_plan(rows):
    """Two variants, and a third once they are done."""
    cells = [cell(codec, seed) for seed in SEEDS for codec in ("fp32", "1bit")]
    return cells + ([cell("2bit", 1)] if len(rows) >= len(cells) else [])


def cell(codec, seed):
    policy = {"num_fragments": 2, "sync_every_steps": 8, "codec": codec}
    recipe = base_recipe(seed, steps=STEPS, num_learners=2, eval_batches=1, policy=policy)
    return Cell(parameters={"codec": codec}, recipe=recipe)


def study(plan=tiny_plan):
    return Study(
        name="tiny",
        plan=plan,
        claims=lambda rows: [
            Claim(claim="there are five", figure=f"{len(rows)} cells", holds=len(rows) == 5)
        ],
        picture=lambda rows: Figure(),
        page=lambda rows, claims: f"# Tiny\n\n{len(rows)} cells, {claims[0].figure}",
    )


class Here:
    """Cells one after the other in this process; the one of `broken` never comes to its end."""

    def __init__(self, broken=None):
        self.done, self.broken = [], broken

    def __call__(self, cells):
        for cell in cells:
            recipe = dict(cell.recipe)
            name = (recipe["policy"]["codec"], recipe["seed"])
            if name == self.broken:
                raise KeyboardInterrupt
            self.done.append(name)
            yield cell, measure(recipe)


def test_a_study_does_its_cells_and_writes_file_page_and_picture(tmp_path):
    here = Here()
    run(study(), tmp_path, here, show=lambda text: None)
    assert here.done == [("fp32", 1), ("1bit", 1), ("fp32", 2), ("1bit", 2), ("2bit", 1)]
    whole = json.loads((tmp_path / "tiny.json").read_bytes())
    assert whole["claims"] == [{"claim": "there are five", "figure": "5 cells", "holds": True}]
    assert len(whole["cells"]) == 5
    row = whole["cells"][0]
    assert row["parameters"] == {"codec": "fp32"}
    assert row["seed"] == row["recipe"]["seed"] == 1
    assert row["outcome"] == "finished"
    assert row["eval_loss"] < row["eval_loss_start"]
    assert 0.9 < row["goodput"] <= 1
    assert row["merged_share"] + sum(row["discarded"].values()) == pytest.approx(1)
    assert row["bytes_up"] > whole["cells"][1]["bytes_up"] > 0
    assert (tmp_path / "tiny.md").read_text() == "# Tiny\n\n5 cells, 5 cells\n"
    assert (tmp_path / "tiny.svg").read_text().count("<svg") == 1


def test_an_interrupted_study_goes_on_where_it_was(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(study(), tmp_path, Here(broken=("fp32", 2)), show=lambda text: None)
    kept = json.loads((tmp_path / "tiny.json").read_bytes())
    assert len(kept["cells"]) == 2
    assert kept["claims"] == []
    here = Here()
    run(study(), tmp_path, here, show=lambda text: None)
    assert here.done == [("fp32", 2), ("1bit", 2), ("2bit", 1)]
    assert load(study(), tmp_path)[:2] == kept["cells"]
    nothing = Here()
    run(study(), tmp_path, nothing, show=lambda text: None)
    assert nothing.done == []


def test_equal_recipes_give_equal_cells():
    recipe = dict(cell("int8", 3).recipe)
    assert measure(recipe) == measure(recipe)


def test_cells_that_a_plan_no_longer_wants_stay_in_the_file_and_out_of_the_page(tmp_path):
    rows = [harness.row_of(cell(codec, 1), {"eval_loss": 2.0}) for codec in ("fp32", "int4")]
    smaller = study(lambda rows: [cell("fp32", 1)])
    save(smaller, tmp_path, rows)
    harness.report(smaller, tmp_path)
    assert len(load(smaller, tmp_path)) == 2
    assert "1 cells" in (tmp_path / "tiny.md").read_text()


def test_differences_are_paired_by_seed():
    rows = [{"seed": 2, "eval_loss": 3.0}, {"seed": 1, "eval_loss": 2.0}]
    reference = [{"seed": 1, "eval_loss": 1.0}, {"seed": 2, "eval_loss": 2.0}]
    assert paired(rows, reference) == [0.5, 1.0]


@pytest.mark.parametrize("name", NAMES)
def test_every_study_plans_different_cells_of_valid_recipes_and_pairs_its_seeds(name):
    cells = study_of(name).plan([])
    assert len({c.key for c in cells}) == len(cells)
    for planned in cells:
        make_recipe(dict(planned.recipe))
    assert study_of(name).name == name
