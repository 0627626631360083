"""`farflung compare`: equal terms or one clear line; one folder each, one table, one page."""

import json
import sys

import pytest
from typer.testing import CliRunner

from farflung import cli, tape

TEXT = """
method = "{method}"
scale = "micro"
num_learners = 2
steps = {steps}
seed = {seed}
batch_size = 2
evals = 1
eval_batches = 1
policy = {policy}
lab = {{workers = 0}}
"""


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, method, steps, seed, policy in [
        ("reference", "data_parallel", 8, 0, "{}"),
        ("free", "decoupled", 8, 0, "{num_fragments = 2, sync_every_steps = 4}"),
        ("longer", "data_parallel", 9, 0, "{}"),
        ("seeded", "data_parallel", 8, 1, "{}"),
    ]:
        text = TEXT.format(method=method, steps=steps, seed=seed, policy=policy)
        (tmp_path / f"{name}.toml").write_text(text)
    return tmp_path


def test_it_writes_a_folder_each_and_one_page_with_three_pictures_of_all(recipes):
    result = CliRunner().invoke(cli.app, ["compare", "reference.toml", "free.toml", "--out", "out", "--json"])
    assert result.exit_code == 0, result.output
    summaries = json.loads(result.stdout)
    assert list(summaries) == ["reference", "free"]
    assert all(s["tokens_trained"] >= 8 * 2 * 2 * 64 for s in summaries.values())
    for name in summaries:
        assert (recipes / "out" / name / tape.REPORT).exists()
    page = (recipes / "out" / "comparison.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "") and "<script" not in page
    for words in ("what the data bought", "what the machines bought", "what the links bought"):
        assert words in page


def test_the_table_has_a_row_a_run(recipes):
    result = CliRunner().invoke(cli.app, ["compare", "reference.toml", "reference.toml", "--out", "out"])
    assert result.exit_code == 0, result.output
    for word in ("reference ", "reference-2", "goodput", "bytes up", "virtual time", "comparison.html"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["reference.toml", "longer.toml"], "differ in token budget"),
        (["reference.toml", "seeded.toml"], "differ in seed (reference: 0, seeded: 1)"),
        (["reference.toml"], "name at least two recipes"),
        (["reference.toml", "missing.toml"], "missing.toml: No such file"),
    ],
)
def test_unequal_terms_are_one_line_before_anything_runs(recipes, args, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["farflung", "compare", *args, "--out", "out"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    out, err = capsys.readouterr()
    assert (exit.value.code, out, err.count("\n")) == (2, "", 1), err
    assert message in err
    assert not (recipes / "out").exists()
