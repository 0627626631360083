"""IDX files: what was written is read, plain or compressed, and damage is told by name."""

import gzip

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from idx_files import idx

from farflung.errors import UserError
from farflung.train.idx import read_idx

SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("idx") / "images"


@settings(max_examples=50, deadline=None)
@given(shape=SHAPES, packed=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_what_is_written_is_read(path, shape, packed, seed):
    values = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    path.write_bytes(gzip.compress(idx(values)) if packed else idx(values))
    read = read_idx(path, len(shape))
    assert read.dtype == torch.uint8
    assert np.array_equal(read.numpy(), values)


@settings(max_examples=50, deadline=None)
@given(shape=SHAPES, packed=st.booleans(), data=st.data())
def test_a_file_that_is_cut_off_anywhere_is_refused_by_name(path, shape, packed, data):
    whole = idx(np.zeros(shape))
    whole = gzip.compress(whole) if packed else whole
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(UserError, match=str(path)):
        read_idx(path, len(shape))


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=60), packed=st.booleans())
def test_any_other_bytes_are_read_or_refused_in_one_line(path, raw, packed):
    path.write_bytes(gzip.compress(raw) if packed else raw)
    try:
        read_idx(path, 1)
    except UserError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not an IDX file: it begins with nothing, should be 00 00 08 03"),
        (b"GIF89a", "not an IDX file: it begins with 47 49 46 38, should be"),
        (idx(np.zeros(3)), "an IDX file of 1 dimensions, 3 are expected (3: images, 1: labels)"),
        (b"\0\0\x0d\x03" + bytes(12), "an IDX file of type 0x0d, only unsigned bytes (0x08) are read"),
        (idx(np.zeros((2, 3, 4)))[:9], "cut off in its header, after 9 bytes"),
        (
            idx(np.zeros((2, 3, 4)))[:-1],
            "cut off: its header promises 2 x 3 x 4 = 24 bytes, 23 follow: fetch it again",
        ),
        (idx(np.zeros((2, 3, 4))) + b"x", "too long: its header promises 2 x 3 x 4 = 24 bytes, 25 follow"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "cut off: its header promises 4294967295 x 4294967295 x 4294967295"),
        (gzip.compress(idx(np.zeros((2, 3, 4))))[:-9], "damaged gzip"),
        (gzip.compress(idx(np.zeros((2, 3, 4))))[:-8] + bytes(8), "damaged gzip (CRC check failed"),
    ],
)
def test_damage_is_told_with_place_reason_and_cure(path, raw, message):
    path.write_bytes(raw)
    with pytest.raises(UserError) as error:
        read_idx(path, 3)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_what_cannot_be_read_is_told(tmp_path):
    with pytest.raises(UserError, match="nothing: No such file or directory"):
        read_idx(tmp_path / "nothing", 3)
    with pytest.raises(UserError, match=f"{tmp_path}: Is a directory"):
        read_idx(tmp_path, 3)
