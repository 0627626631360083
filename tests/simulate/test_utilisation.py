"""Compute utilisation: closed forms of a step, and Streaming DiLoCo's table."""

import itertools

import numpy as np
import pytest

from farflung.errors import UserError
from farflung.simulate.presets import GRID, bandwidth
from farflung.simulate.utilisation import Model, Sync, needed_gbps, utilisation

MODEL = Model(params=1e9, layers=24, step_s=0.1)


def test_data_parallel_hides_what_fits_behind_the_backward_pass() -> None:
    reduce_s = 1e9 * 16 / 100e9  # all of it at 100 Gbit/s: longer than what is left of backward
    hidden_s = MODEL.step_s * 2 / 3 * 23 / 24
    expected = MODEL.step_s / (MODEL.step_s + reduce_s - hidden_s)
    assert utilisation(MODEL, Sync(bits=16), [100.0])[0] == pytest.approx(expected)


def test_a_fast_link_leaves_only_the_first_layer_exposed() -> None:
    exposed_s = 1e9 * 16 / 24 / 1000e9
    assert utilisation(MODEL, Sync(bits=16), [1000.0])[0] == pytest.approx(0.1 / (0.1 + exposed_s))


def test_fewer_syncs_fragments_overlap_and_bits_each_need_less() -> None:
    ways = [
        Sync(),
        Sync(every_steps=100),
        Sync(every_steps=100, fragments=8),
        Sync(every_steps=100, fragments=8, overlap_steps=1),
        Sync(every_steps=100, fragments=8, overlap_steps=1, bits=4),
    ]
    needed = [needed_gbps(MODEL, way, [0.95], GRID)[0] for way in ways]
    assert all(a is not None and b is not None and a > b for a, b in itertools.pairwise(needed))


def test_utilisation_grows_with_bandwidth() -> None:
    assert np.all(np.diff(utilisation(MODEL, Sync(every_steps=100, fragments=8), GRID)) >= 0)


def test_what_no_bandwidth_reaches_is_none() -> None:
    assert needed_gbps(MODEL, Sync(), [0.999999], GRID) == [None]


def test_no_bandwidth_is_refused() -> None:
    with pytest.raises(UserError, match="bandwidth"):
        utilisation(MODEL, Sync(), [0.0])


def test_the_published_table_is_reproduced_within_a_step_of_its_grid() -> None:
    cells = [c for c in bandwidth() if c["method"] != "data_parallel"]
    assert len(cells) == 40
    assert sum(abs(c["grid_steps_off"]) <= 1 for c in cells) == 40
    assert sum(c["grid_steps_off"] == 0 for c in cells) >= 35
