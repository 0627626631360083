"""docs/lab.md names what the [lab] table takes; docs/glossary.md is in alphabetical order."""

import re
import tomllib

from farflung.recipe import Lab, make_recipe


def rows(path, until=None):
    """First cells and last cells of the table rows of a page."""
    lines = path.read_text().partition(until or chr(0))[0].splitlines()
    return [
        (line.split("|")[1].strip(), line.split("|")[-2].strip()) for line in lines if line.startswith("|")
    ]


def test_the_page_names_every_key_and_shows_a_shared_uplink_that_is_one(request):
    keys = dict(rows(request.config.rootpath / "docs" / "lab.md", "## Determinism"))
    named = [name for key in keys if key.startswith("`") for name in re.findall(r"`(\w+)`", key)]
    assert sorted(named) == sorted(Lab.__struct_fields__)
    (example,) = re.findall(r"`([^`]*mbps[^`]*)`", keys["`shared_uplinks`"])
    value = tomllib.loads(f"v = {example.replace('...', repr('learner-0'))}")["v"]
    assert make_recipe({"lab": {"shared_uplinks": value}}).lab.shared_uplinks[0].mbps == 100.0


def test_the_glossary_is_in_order(request):
    words = [word.lower() for word, _ in rows(request.config.rootpath / "docs" / "glossary.md")[2:]]
    assert len(words) > 60 and words == sorted(words)
