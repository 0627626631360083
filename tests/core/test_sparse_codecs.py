"""Sparse codecs against a naive version, their exact sizes, names, and what each part promises.

The contract that all codecs share is in test_codecs.py; the parts are in test_sparse_parts.py.
"""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.codecs import (
    CODECS,
    contributor_mean,
    drop_sent,
    encode_with_feedback,
    get_codec,
    put_back,
    weighted_sum,
)
from farflung.core.codecs.base import STRIP
from farflung.core.codecs.chunks import tensor_chunks
from farflung.core.codecs.dct import dct_plain, idct_plain
from farflung.core.codecs.dense import dense_codec
from farflung.core.codecs.select import drawn

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = [
    "top64-2bit-12bit",
    "top4-fp32-u16-chunk64",
    "top3-bf16-gaps-chunk64",
    "dct-top32-int8-12bit",
    "dct-top4-fp32-gaps-chunk128",
    "dct-top2-1bit-12bit-chunk16",
    "dct-random64-bf16",
    "dct-all-fp32",
    "dct-all-int4-chunk256",
    "random5-fp32-chunk64-seed3",
    "rows64-bf16-chunk128-seed9",
    "all-2bit",
]
SIZES = st.sampled_from([0, 1, 2, 7, 63, 64, 65, 127, 131, 257, 4095, 4096, 4097, 8192 + 13])
by_name = pytest.mark.parametrize("name", NAMES)


def _vector(size, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=rng) * torch.rand(size, generator=rng) ** 4


def _error(codec, x):
    return ((codec.decode(codec.encode(x), len(x)) - x).norm() / x.norm()).item()


# A naive version, chunk by chunk


def _naive_decoded(codec, x):
    """What a payload must decode to, before values are packed: the formula of the module's docstring."""
    y = x.clone()
    for start in range(0, len(x), codec.chunk):
        part = x[start : start + codec.chunk]
        rows = codec.dct and len(part) > 64
        size = -(-len(part) // 64) * 64 if rows else len(part)
        positions = _naive_positions(codec, part, size)
        if positions is None:
            continue
        padded = torch.zeros(size)
        padded[: len(part)] = part
        shape = (1, size // 64, 64) if rows else (1, 1, size)
        coef = dct_plain(padded.double().view(shape)).flatten() if codec.dct else padded.double()
        places = positions(coef)
        kept = torch.zeros(size, dtype=torch.float64)
        kept[places] = coef[places]
        whole = idct_plain(kept.view(shape)).flatten() if codec.dct else kept
        y[start : start + codec.chunk] = whole[: len(part)].float()
    return y


def _naive_positions(codec, part, size):
    """How places are chosen among coefficients; None where the part travels whole."""
    if codec.select == "all":
        return (lambda coef: list(range(size))) if len(part) == codec.chunk else None
    if codec.k >= len(part):
        return None
    if codec.select == "top":
        index_bits = {"12bit": 12, "u16": 16}[codec.indices]
        index_bytes = math.ceil(codec.k * index_bits / 8)
        if len(part) * 4 <= codec.k * 4 + index_bytes:
            return None
        return lambda coef: sorted(sorted(range(size), key=lambda i: (-abs(coef[i]), i))[: codec.k])
    unit = 64 if codec.select == "rows" else 1
    units = drawn(-(-size // unit), codec.k // unit, codec.seed, codec.counter)
    return lambda coef: [i for u in units for i in range(u * unit, min(size, (u + 1) * unit))]


@pytest.mark.parametrize(
    "name",
    [
        "top5-fp32-12bit-chunk64",
        "top5-fp32-u16-chunk64",
        "dct-top5-fp32-12bit-chunk64",
        "dct-top9-fp32-u16-chunk256",
        "random9-fp32-chunk64-seed4",
        "dct-random9-fp32-chunk64",
        "rows64-fp32-chunk256",
        "dct-all-fp32-chunk64",
    ],
)
@given(size=st.integers(0, 600), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=15)
def test_with_exact_values_it_decodes_to_the_naive_version(name, size, seed):
    codec, x = get_codec(name).at(seed), _vector(size, seed)
    got = codec.decode(codec.encode(x), size)
    torch.testing.assert_close(got, _naive_decoded(codec, x), rtol=0, atol=1e-6)


@by_name
@given(size=SIZES, seed=st.integers(0, 9))
@settings(deadline=None, max_examples=14)
def test_the_size_is_the_real_one(name, size, seed):
    codec, x = get_codec(name), _vector(size, seed)
    payload = codec.encode(x)
    assert payload.dtype == torch.uint8
    assert payload.numel() == codec.size_bytes(size)
    place, value = codec.coefficients(payload, size)
    assert place.numel() == value.numel() == codec.num_sent(size) <= codec.num_coefficients(size)
    assert (place.diff() > 0).all()


@pytest.mark.parametrize("values", list(CODECS))
@pytest.mark.parametrize("rest", ["-gaps", "-12bit-chunk64"])
def test_the_values_of_a_group_are_those_of_the_dense_codec_in_order(values, rest):
    x, size = _vector(4096 * 3), 4096 * 3
    exact, codec = get_codec(f"dct-top4-fp32{rest}"), get_codec(f"dct-top4-{values}{rest}")
    chosen, sent = (c.coefficients(c.encode(x), size) for c in (exact, codec))
    assert torch.equal(sent.place_V, chosen.place_V)
    dense = CODECS[values]
    assert torch.equal(sent.value_V, dense.decode(dense.encode(chosen.value_V), len(chosen.value_V)))


# Sizes


def test_sparseloco_is_146_times_smaller_than_fp32_and_statistics_take_little_of_it():
    num = 4096 * 4096
    assert round(4096 * 32 / (64 * (12 + 2)), 2) == 146.29
    shared = get_codec("top64-2bitx262144-12bit")  # one tensor with one set of bin means
    assert shared.size_bytes(num) == 4096 * 64 * (12 + 2) // 8 + 8
    assert round(4 * num / shared.size_bytes(num), 2) == 146.28
    blocks = get_codec("top64-2bit-12bit")  # bin means for 256 values: 0.25 bits a value
    assert blocks.size_bytes(num) == 4096 * 64 * (12 + 2.25) // 8
    assert round(4 * num / blocks.size_bytes(num), 2) == 143.72
    assert round(4 * num / get_codec("top64-2bit-gaps").size_bytes(num), 1) == 200.1


@pytest.mark.parametrize(
    ("name", "bits_of_a_chunk"),
    [
        ("dct-top32-fp32-12bit", 32 * 44),
        ("dct-top32-fp32-u16", 32 * 48),
        ("dct-top32-int8-12bit", 32 * (8 + 12) + 4),
        ("dct-random32-bf16", 32 * 16),
        ("rows64-fp32", 64 * 32),
        ("dct-all-int8", 4096 * 8.125),
    ],
)
def test_sizes_follow_the_formula(name, bits_of_a_chunk):
    draws = 8 if "r" in name.split("-")[-2] else 0
    assert get_codec(name).size_bytes(4096 * 800) - draws * ("all" not in name) == 100 * bits_of_a_chunk


def test_nothing_is_larger_than_dense():
    for name in NAMES:
        codec = get_codec(name)
        for size in (0, 1, 5, 63, 64, 100, 1000, 4096, 5000):
            padding = codec.values.size_bytes(codec.num_coefficients(size))
            slack = 16 + (8 if codec.select in ("random", "rows") else 0)
            assert codec.size_bytes(size) <= max(codec.values.size_bytes(size), padding) + slack


@pytest.mark.parametrize("size", [1, 3, 30, 64])
def test_what_is_small_travels_whole_and_untransformed(size):
    codec, x = get_codec("dct-top64-fp32-12bit"), _vector(size)
    assert codec.size_bytes(size) == 4 * size
    assert torch.equal(codec.decode(codec.encode(x), size), x)


def test_k_so_large_that_positions_cost_more_than_they_save_sends_all():
    assert get_codec("top3000-int8-12bit").size_bytes(4096) == CODECS["int8"].size_bytes(4096)
    assert get_codec("dct-top32-int8-12bit-chunk64").num_sent(640) == 640


@pytest.mark.parametrize("name", list(CODECS))
def test_all_elements_are_the_dense_codec_itself(name):
    x = _vector(5000)
    assert torch.equal(get_codec(f"all-{name}").encode(x), CODECS[name].encode(x))


# Transforms


@given(size=SIZES, seed=st.integers(0, 99))
@settings(deadline=None, max_examples=20)
def test_all_coefficients_give_the_vector_back_whatever_its_length(size, seed):
    x = _vector(size, seed)
    for name in ("dct-all-fp32", "dct-all-fp32-chunk64", "dct-all-fp32-chunk8"):
        codec = get_codec(name)
        torch.testing.assert_close(codec.decode(codec.encode(x), size), x, rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", [STRIP - 1, STRIP + 300, 2 * STRIP + 4097])
@pytest.mark.parametrize("name", ["top64-fp32-12bit", "dct-top32-fp32-gaps", "random64-fp32"])
def test_long_vectors_are_coded_like_their_parts(name, size):
    codec, x = get_codec(name), _vector(size)
    y = codec.decode(codec.encode(x), size)
    for part in (slice(0, 4096), slice(STRIP - 4096, min(STRIP, size)), slice(size // 4096 * 4096, size)):
        alone = codec.decode(codec.encode(x[part]), len(x[part]))
        torch.testing.assert_close(y[part], alone, rtol=0, atol=1e-6)


def test_a_smooth_vector_needs_few_coefficients_but_many_elements():
    x = torch.sin(torch.linspace(0, 20, 4096 * 4))
    assert (
        _error(get_codec("dct-top32-fp32-12bit"), x) < 0.02 < 0.9 < _error(get_codec("top32-fp32-12bit"), x)
    )


def test_of_white_noise_the_largest_elements_hold_more_than_drawn_ones():
    x = torch.randn(4096 * 4, generator=torch.Generator().manual_seed(0))
    assert _error(get_codec("top64-fp32-12bit"), x) < 0.95 < _error(get_codec("random64-fp32"), x)


# Draws


def test_draws_send_every_coefficient_once_in_as_many_rounds_as_chunks_hold_k():
    x = _vector(1000)
    for name, rounds in (("random16-fp32-chunk128", 8), ("rows64-fp32-chunk256", 4)):
        codec, total = get_codec(name), torch.zeros(1000)
        for counter in range(rounds):
            total += codec.decode(codec.at(counter).encode(x), 1000)
        whole = slice(0, 768)  # the rest is shorter, and comes round faster
        assert torch.equal(total[whole], x[whole])


def test_a_decoder_needs_no_counter_and_payloads_of_one_draw_sum_like_vectors():
    codec, parts = get_codec("random16-fp32-chunk128-seed5"), [_vector(500, seed) for seed in range(3)]
    payloads = [codec.at(77).encode(part) for part in parts]
    places = [codec.coefficients(payload, 500).place_V for payload in payloads]
    assert all(torch.equal(place, places[0]) for place in places)
    total = codec.at(77).encode(sum(parts))
    torch.testing.assert_close(sum(codec.decode(p, 500) for p in payloads), codec.decode(total, 500))
    assert not torch.equal(codec.coefficients(codec.at(78).encode(parts[0]), 500).place_V, places[0])


def test_another_seed_draws_otherwise():
    x, codec = _vector(500), get_codec("random16-fp32-chunk128")
    other = get_codec("random16-fp32-chunk128-seed1")
    assert not torch.equal(codec.decode(codec.encode(x), 500), other.decode(other.encode(x), 500))


# Tensors


SHAPES = [(50257 // 29, 7), (64, 128), (), (0, 3), (67,), (5, 3, 2, 2), (128,)]


def test_along_tensors_each_is_coded_as_if_it_were_alone():
    codec = get_codec("dct-top3-int8-12bit-tensors")
    parts = [_vector(math.prod(shape), seed) for seed, shape in enumerate(SHAPES)]
    together = codec.for_shapes(SHAPES)
    x = torch.cat(parts)
    y, start = together.decode(together.encode(x), len(x)), 0
    for shape, part in zip(SHAPES, parts, strict=True):
        alone = codec.for_shapes([shape])
        decoded = alone.decode(alone.encode(part), len(part))
        torch.testing.assert_close(y[start : start + len(part)], decoded, rtol=0, atol=1e-6)
        start += len(part)
    assert together.size_bytes(len(x)) == sum(codec.for_shapes([s]).size_bytes(math.prod(s)) for s in SHAPES)


def test_along_tensors_the_authors_rule_comes_out():
    """Chunks of tensor sides' largest divisors, k of each, the inverse of what was kept."""
    shape, k = (6, 4 * 3 * 7 * 11), 5
    codec = get_codec(f"dct-top{k}-fp32-12bit-tensors").for_shapes([shape])
    x = _vector(math.prod(shape))
    y, want = codec.decode(codec.encode(x), len(x)).view(shape), torch.empty(shape)
    _, columns, h, w = tensor_chunks(shape)
    assert (columns, h, w) == (21, 6, 44)
    for c in range(columns):
        coef = dct_plain(x.view(shape)[:, c * w : (c + 1) * w].double()[None]).flatten()
        kept = torch.zeros_like(coef)
        kept[coef.abs().topk(k).indices] = coef[coef.abs().topk(k).indices]
        want[:, c * w : (c + 1) * w] = idct_plain(kept.view(1, h, w))[0].float()
    torch.testing.assert_close(y, want, rtol=0, atol=1e-6)


@given(shape=st.lists(st.integers(0, 70), max_size=3), seed=st.integers(0, 9))
@settings(deadline=None, max_examples=40)
def test_all_coefficients_of_a_tensor_give_it_back_whatever_its_sides(shape, seed):
    codec = get_codec("dct-all-fp32-tensors").for_shapes([shape, (3,)])
    x = _vector(math.prod(shape) + 3, seed)
    torch.testing.assert_close(codec.decode(codec.encode(x), len(x)), x, rtol=0, atol=4e-6)


def test_shapes_that_are_missing_or_do_not_fit_are_refused():
    codec = get_codec("top3-int8-12bit-tensors")
    with pytest.raises(ValueError, match="needs the shapes"):
        codec.size_bytes(12)
    with pytest.raises(ValueError, match="hold 12 elements, not 13"):
        codec.for_shapes([(3, 4)]).encode(torch.zeros(13))
    with pytest.raises(ValueError, match="no effect without tensors"):
        get_codec("top3-int8-12bit").for_shapes([(3, 4)])


# What was not finite, and what was not encoded


@by_name
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 4095, 4096, 8499])
def test_a_chunk_that_is_not_finite_decodes_to_something_not_finite_in_it(name, bad, at):
    codec, x = get_codec(name), _vector(8500)
    x[at] = bad
    y = codec.decode(codec.encode(x), 8500)
    chunk = slice(at // codec.chunk * codec.chunk, at // codec.chunk * codec.chunk + codec.chunk)
    assert not torch.isfinite(y[chunk]).all()
    if codec.dct and at < 8192:  # the rest may travel untransformed
        assert not torch.isfinite(y[chunk]).any()


def test_with_exact_values_the_other_chunks_are_not_touched():
    x = _vector(4096 * 3)
    want = [get_codec(name).decode(get_codec(name).encode(x), len(x)) for name in NAMES]
    x[5000] = math.nan
    for name, before in zip(NAMES, want, strict=True):
        codec = get_codec(name)
        if codec.values.name in ("fp32", "bf16"):
            y = codec.decode(codec.encode(x), len(x))
            assert torch.equal(y[:4096], before[:4096]) and torch.equal(y[8192:], before[8192:])


def test_positions_beyond_the_rest_of_a_vector_are_refused_and_not_dropped():
    codec = get_codec("top2-fp32-u16-chunk64")
    payload = codec.encode(_vector(64 + 40))
    codec.decode(payload, 104)
    payload[-1] = 1  # 256 and more
    with pytest.raises(ValueError, match=r"payload: an index is \d+, it must be below 40"):
        codec.decode(payload, 104)
    with pytest.raises(ValueError, match="must be below 40"):
        codec.coefficients(payload, 104)


@by_name
def test_any_bytes_of_the_right_size_decode_or_are_refused_in_one_line(name):
    codec, rng = get_codec(name), torch.Generator().manual_seed(0)
    for size in (100, 4500):
        for _ in range(5):
            raw = torch.randint(256, (codec.size_bytes(size),), generator=rng, dtype=torch.uint8)
            try:
                assert codec.decode(raw, size).numel() == size
            except ValueError as error:
                assert re.fullmatch("payload: .*", str(error))


@by_name
def test_the_bits_do_not_depend_on_addresses_or_threads(name):
    codec, x = get_codec(name), _vector(4096 * 3 + 100)
    payload = codec.encode(x)
    shifted = torch.cat([x[:3], x])[3:]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(codec.encode(shifted), payload)
            assert torch.equal(codec.decode(payload, len(x)), codec.decode(payload.clone(), len(x)))
    finally:
        torch.set_num_threads(before)


# Halves and sums


@by_name
@pytest.mark.parametrize("size", [0, 5, 4096 + 70, STRIP + 5000])
def test_decoding_is_restoring_the_coefficients(name, size):
    codec = get_codec(name).at(3)
    payload = codec.encode(_vector(size))
    restored = codec.restore(codec.coefficients(payload, size), size)
    assert torch.equal(restored, codec.decode(payload, size))


def test_payloads_are_summed_in_coefficients_as_if_they_were_vectors():
    codec, size = get_codec("dct-top8-int8-12bit-chunk256"), 3000
    payloads = [codec.encode(_vector(size, seed)) for seed in range(4)]
    weights = [0.1, 0.2, 0.3, 0.4]
    parts = [codec.coefficients(payload, size) for payload in payloads]
    total = weighted_sum(parts, weights)
    assert (total.place_V.diff() > 0).all()
    dense = sum(w * codec.decode(p, size) for w, p in zip(weights, payloads, strict=True))
    torch.testing.assert_close(codec.restore(total, size), dense, rtol=0, atol=1e-6)
    again = weighted_sum(parts, weights)
    assert torch.equal(again.value_V, total.value_V)


def test_the_mean_over_contributors_is_larger_where_few_send():
    codec, size, num = get_codec("top4-fp32-12bit-chunk64"), 256, 4
    parts = [codec.coefficients(codec.encode(_vector(size, seed)), size) for seed in range(num)]
    plain, mean = weighted_sum(parts, [1 / num] * num), contributor_mean(parts, [1 / num] * num)
    holders = torch.stack([torch.isin(plain.place_V, part.place_V) for part in parts]).sum(0)
    torch.testing.assert_close(mean.value_V, plain.value_V * num / holders)
    assert holders.min() == 1 < holders.max()
    for call in (lambda: weighted_sum([], []), lambda: contributor_mean(parts, [0.5, 0.5, 0, 0])):
        with pytest.raises(ValueError, match="weights"):
            call()


def test_places_beyond_the_vector_are_refused():
    codec = get_codec("top4-fp32-12bit-chunk64")
    part = codec.coefficients(codec.encode(_vector(256)), 256)
    with pytest.raises(ValueError, match="must be from 0 to 127"):
        codec.restore(part, 128)


# Buffers


def test_what_is_dropped_and_put_back_conserves_the_sum_of_all_buffers():
    codec, num, size = get_codec("dct-top4-int8-12bit-chunk64"), 3, 500
    buffers = [_vector(size, seed).double() for seed in range(num)]
    sent = [codec.decode(codec.encode(m.float()), size).double() for m in buffers]
    mean = sum(sent) / num
    after = [put_back(drop_sent(m, s), mean) for m, s in zip(buffers, sent, strict=True)]
    torch.testing.assert_close(sum(after), sum(buffers), rtol=0, atol=1e-12)
    assert not any(torch.equal(a, b) for a, b in zip(after, buffers, strict=True))


def test_equal_workers_that_send_all_keep_their_buffers():
    m = _vector(300).double()
    torch.testing.assert_close(put_back(drop_sent(m, m), m), m, rtol=0, atol=0)


def test_dropping_what_was_sent_is_error_feedback():
    codec, x = get_codec("top4-int8-12bit-chunk64"), _vector(300)
    payload, residual = encode_with_feedback(codec, x, torch.zeros(300))
    assert torch.equal(drop_sent(x, codec.decode(payload, 300)), residual)


@by_name
def test_with_feedback_nothing_is_lost_for_ever(name):
    """The residual stays bounded, so what was sent on average approaches what was meant."""
    codec, x, rounds = get_codec(name), _vector(512), 60
    residual, sent = torch.zeros(512), torch.zeros(512)
    for counter in range(rounds):
        payload, residual = encode_with_feedback(codec.at(counter), x, residual)
        sent += codec.decode(payload, 512)
    assert (sent / rounds - x).norm() < 0.35 * x.norm()


# Names


@by_name
def test_a_name_gives_the_codec_that_has_it(name):
    assert get_codec(name).name == name
    assert get_codec(get_codec(name).at(5).name) == get_codec(name)


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("top64-2bit", "top64-2bit-12bit"),
        ("top64-2bit-chunk8192", "top64-2bit-u16-chunk8192"),
        ("top64-2bitx256-12bit-chunk4096", "top64-2bit-12bit"),
        ("random64-bf16-seed0", "random64-bf16"),
        ("dct-top32-fp32-tensors-gaps", "dct-top32-fp32-gaps-tensors"),
        ("top8-int8x32-gaps", "top8-int8x32-gaps"),
    ],
)
def test_what_is_usual_may_be_left_out_or_said(short, full):
    assert get_codec(short).name == full


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("dct", "'dct' is unknown"),
        ("dct-", "'' is no selection"),
        ("dct-int8", "'int8' is no selection"),
        ("topp32-int8", "'topp32' is no selection"),
        ("top0-int8", "'top0' is no selection"),
        ("top32-", "'' is unknown"),
        ("all-", "'' is unknown"),
        ("dct-all", "wants a format of values"),
        ("top32-int9", "did you mean 'int8'"),
        ("top32-fp32x8", "has no block '8'"),
        ("top32-int8x", "has no block ''"),
        ("top32-int8x7", "power of two"),
        ("top32-int8-13bit", "did you mean '12bit'"),
        ("top32-int8-12bit-gaps", "indices is said twice"),
        ("top32-int8-chunk100", "power of two"),
        ("dct-top32-int8-chunk8192", "to 4096 with dct"),
        ("top32-int8-12bit-chunk8192", "needs 'u16'"),
        ("top5000-int8", "k = 5000 must be from 1 to 4096"),
        ("random64-int8-12bit", "no effect with select = 'random'"),
        ("top64-int8-seed4", "seed = 4 has no effect"),
        ("random64-int8-seed99999999999999999999", "2\\^64"),
        ("rows65-int8", "rows are of 64"),
        ("dct-rows64-int8", "without dct"),
        ("top64-int8-chunk64-tensors", "no effect along tensors"),
    ],
)
def test_a_name_that_makes_no_sense_is_refused_in_one_line_that_says_why(name, why):
    with pytest.raises(ValueError, match=why) as refused:
        get_codec(name)
    assert repr(name) in str(refused.value) and "\n" not in str(refused.value)


def test_values_may_share_statistics_by_other_blocks():
    assert dense_codec("2bitx4096").block == 4096
    assert dense_codec("int8") is CODECS["int8"]
