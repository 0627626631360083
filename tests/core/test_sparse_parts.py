"""What sparse codecs are made of: packed bits, positions on the wire, the choice of coefficients, the chunks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.codecs.base import STRIP
from farflung.core.codecs.bits import (
    num_bytes,
    packed_numbers,
    packed_numbers_plain,
    unpacked_numbers,
    unpacked_numbers_plain,
)
from farflung.core.codecs.chunks import Group, flat_groups, piece_shapes, tensor_chunks, tensor_groups
from farflung.core.codecs.indices import INDICES
from farflung.core.codecs.select import drawn, top_k, top_k_plain
from farflung.core.fragments import Piece, TensorSpec, make_plan

# Bits


@given(bits=st.integers(1, 16), num=st.integers(1, 40), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=60)
def test_packed_numbers_come_back_and_lie_as_the_bits_of_one_long_number(bits, num, seed):
    number = torch.randint(2**bits, (num,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    raw = packed_numbers(number, bits)
    long = sum(value << bits * place for place, value in enumerate(number.tolist()))
    assert bytes(raw.tolist()) == long.to_bytes(num_bytes(num, bits), "little")
    assert torch.equal(raw, packed_numbers_plain(number, bits))
    assert torch.equal(unpacked_numbers(raw, bits, num), number)
    assert torch.equal(unpacked_numbers_plain(raw, bits, num), number)


# Positions


every_format = pytest.mark.parametrize("form", INDICES.values(), ids=INDICES)


@every_format
@given(num=st.integers(1, 4), size=st.sampled_from([1, 2, 7, 64, 1856, 4096]), share=st.floats(0, 1),
       seed=st.integers(0, 99))  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_positions_come_back_in_as_many_bytes_as_were_said(form, num, size, share, seed):
    k = max(1, round(share * size))
    rng = torch.Generator().manual_seed(seed)
    index = torch.rand(num, size, generator=rng).argsort(1)[:, :k].sort(1).values
    raw = form.encode(index.int(), size)
    assert raw.dtype == torch.uint8
    assert raw.numel() == form.size_bytes(num, k, size)
    unaligned = torch.cat([raw[:1], raw])[1:]
    assert torch.equal(form.decode(unaligned, num, k, size), index)


@every_format
def test_extreme_positions_come_back(form):
    for size, k in ((4096, 64), (4096, 1), (4096, 4096), (1856, 32)):
        index = torch.stack([torch.arange(k), torch.arange(size - k, size)])
        assert torch.equal(form.decode(form.encode(index.int(), size), 2, k, size), index)


@every_format
def test_positions_that_no_encoder_writes_are_refused_in_one_line(form):
    """Any bytes give either positions that increase and stay below the size, or a ValueError."""
    rng, refused = torch.Generator().manual_seed(0), 0
    for size, k in ((1000, 8), (4096, 2), (40, 30)):
        for _ in range(40):
            raw = torch.randint(256, (form.size_bytes(2, k, size),), generator=rng, dtype=torch.uint8)
            try:
                index = form.decode(raw, 2, k, size)
                assert (index.diff() > 0).all() and index.min() >= 0 and index.max() < size
            except ValueError as error:
                refused += 1
                assert str(error).startswith("payload: ") and "\n" not in str(error)
    assert refused > 60


@pytest.mark.parametrize(("name", "why"), [("12bit", "4001, it must be below 4000"), ("u16", "below 4000")])
def test_a_position_beyond_the_chunk_is_named(name, why):
    raw = INDICES[name].encode(torch.tensor([[5, 4001]], dtype=torch.int32), 4096)
    with pytest.raises(ValueError, match=why):
        INDICES[name].decode(raw, 1, 2, 4000)


def test_positions_that_repeat_are_refused():
    raw = INDICES["12bit"].encode(torch.tensor([[7, 7]], dtype=torch.int32), 4096)
    with pytest.raises(ValueError, match="do not increase"):
        INDICES["12bit"].decode(raw, 1, 2, 4096)
    with pytest.raises(ValueError, match="has not the 2 indices"):
        INDICES["gaps"].decode(
            torch.zeros_like(INDICES["gaps"].encode(torch.tensor([[1, 7]]).int(), 64)), 1, 2, 64
        )


@pytest.mark.parametrize(("k", "bits"), [(64, 7.984375), (32, 8.96875)])
def test_gaps_are_near_the_information_bound_and_12_bits_are_not(k, bits):
    bound = math.log2(math.comb(4096, k)) / k
    assert INDICES["gaps"].size_bytes(64, k, 4096) * 8 / (64 * k) == bits
    assert bound < bits < bound + 0.7 < 12 == INDICES["12bit"].size_bytes(64, k, 4096) * 8 / (64 * k)


# Selection


@given(num=st.integers(1, 4), size=st.integers(1, 70), share=st.floats(0, 1), few=st.booleans(),
       seed=st.integers(0, 999))  # fmt: skip
@settings(deadline=None, max_examples=100)
def test_the_largest_are_found_the_first_of_equals_as_by_a_stable_sort(num, size, share, few, seed):
    rng, k = torch.Generator().manual_seed(seed), max(1, round(share * size))
    coef = torch.randn(num, size, generator=rng)
    coef = coef.round() if few else coef  # many ties, and both zeros
    index = top_k(coef, k)
    assert torch.equal(index, top_k_plain(coef, k))
    for row, places in zip(coef.tolist(), index.tolist(), strict=True):
        assert places == sorted(sorted(range(size), key=lambda i: (-abs(row[i]), i))[:k])


def test_what_is_not_finite_is_chosen_first_and_zeros_in_order():
    coef = torch.zeros(2, 9)
    coef[0, 3:7] = torch.tensor([math.inf, 1.0, math.nan, -math.inf])
    assert top_k(coef, 3).tolist() == top_k_plain(coef, 3).tolist() == [[3, 5, 6], [0, 1, 2]]


@given(
    num=st.integers(1, 50), k=st.integers(1, 50), seed=st.integers(0, 2**64 - 1), first=st.integers(0, 2**60)
)
@settings(deadline=None, max_examples=60)
def test_consecutive_draws_hold_every_position(num, k, seed, first):
    k = min(k, num)
    rounds = -(-num // k)
    draws = [drawn(num, k, seed, first * rounds + i) for i in range(rounds)]
    assert all(len(set(draw)) == k and list(draw) == sorted(draw) for draw in draws)
    assert set().union(*draws) == set(range(num))


def test_draws_differ_by_seed_and_by_epoch_and_never_change():
    assert drawn(4096, 4, 7, 12345) == (539, 663, 2252, 4072)  # on every machine, in every version
    assert len({drawn(4096, 8, seed, epoch * 512) for seed in range(5) for epoch in range(5)}) == 25


def test_every_position_is_drawn_equally_often():
    counts = torch.zeros(40)
    for counter in range(400):
        counts[list(drawn(40, 7, 3, counter * 6))] += 1  # the first draw of each epoch
    assert counts.sum() == 2800
    assert (counts - 70).abs().max() < 5 * math.sqrt(70)


# Chunks


def _coefficients(group, vector):
    return torch.cat([coef.clone() for _, coef in group.coefficients(vector)])


def test_along_tensors_a_chunk_is_a_block_of_rows_and_columns():
    x = torch.arange(6.0 * 128).view(6, 128)
    (group,) = tensor_groups([(6, 128)], False, lambda size: 1)
    assert (group.y, group.x, group.h, group.w) == (1, 2, 6, 64)
    assert torch.equal(
        _coefficients(group, x.flatten()), torch.stack([x[:, :64].flatten(), x[:, 64:].flatten()])
    )


@pytest.mark.parametrize(
    ("shape", "cut"),
    [
        ((), (1, 1, 1, 1)),
        ((64,), (1, 1, 1, 64)),
        ((67,), (1, 67, 1, 1)),  # a prime side is cut into ones
        ((50257, 768), (1733, 12, 29, 64)),
        ((32, 16, 3, 3), (1, 3, 32, 48)),  # a convolution is a matrix
        ((100, 1), (2, 1, 50, 1)),
    ],
)
def test_sides_are_cut_by_their_largest_divisor_up_to_64(shape, cut):
    assert tensor_chunks(shape) == cut


@pytest.mark.parametrize("shape", [(128, 64 * 300), (64 * 70, 64), (64 * 3, 64 * 30), (61, 64 * 70)])
def test_strips_are_small_and_hold_all_chunks_in_order(shape):
    (group,) = tensor_groups([shape], False, lambda size: 1)
    x = torch.arange(float(math.prod(shape)))
    strips = [(at, coef.clone()) for at, coef in group.coefficients(x)]
    assert [at.start for at, _ in strips[1:]] == [at.stop for at, _ in strips[:-1]]
    assert all(coef.numel() <= STRIP and len(coef) == at.stop - at.start for at, coef in strips)
    blocks = x.view(group.y, group.h, group.x, group.w).transpose(1, 2).reshape(group.num, group.size)
    assert torch.equal(torch.cat([coef for _, coef in strips]), blocks)
    y, done = torch.empty_like(x), 0
    for at, coef in group.restored(y):
        coef.copy_(blocks[at])
        done += 1
    assert torch.equal(y, x) and done == len(strips) > 1


@given(num=st.integers(0, 400), dct=st.booleans(), rows=st.booleans(), k=st.integers(1, 64))
@settings(deadline=None, max_examples=100)
def test_groups_tile_the_vector(num, dct, rows, k):
    groups = flat_groups(num, 64, dct, rows and not dct, lambda size: min(k, size))
    edges = [0, *(group.stop for group in groups)]
    assert [group.start for group in groups] == edges[:-1] and edges[-1] == num
    assert all(group.num * group.size >= group.stop - group.start for group in groups)


def test_pieces_of_whole_rows_keep_the_shape_and_others_are_vectors():
    specs = [
        TensorSpec(name="a", shape=(10, 4), dtype="float32", kind="param"),
        TensorSpec(name="b", shape=(3, 2, 2), dtype="float32", kind="param"),
        TensorSpec(name="c", shape=(5,), dtype="float32", kind="param"),
    ]
    parts = [("a", 4, 8), ("a", 13, 2), ("b", 0, 12), ("c", 1, 3)]
    pieces = [Piece(name=n, start=s, length=c, offset=0, embedding=False) for n, s, c in parts]
    assert piece_shapes(pieces, specs) == ((2, 4), (2,), (3, 2, 2), (3,))
    with pytest.raises(ValueError, match="unknown tensors: z"):
        piece_shapes([Piece(name="z", start=0, length=1, offset=0, embedding=False)], specs)


def test_the_shapes_of_a_plan_hold_the_elements_of_its_fragments():
    specs = [TensorSpec(name=f"w{i}", shape=(17, 5 + i), dtype="float32", kind="param") for i in range(5)]
    for fragment in make_plan(specs, 3).fragments:
        groups = tensor_groups(piece_shapes(fragment.pieces, specs), True, lambda size: size)
        assert groups[-1].stop == fragment.num_elements


def test_a_plain_group_is_one_whose_elements_travel_as_they_are():
    assert Group(start=3, stop=8, h=1, w=5, k=5).is_plain
    assert not Group(start=3, stop=8, h=1, w=5, k=4).is_plain
    assert not Group(start=3, stop=8, h=1, w=5, k=5, dct=True).is_plain
