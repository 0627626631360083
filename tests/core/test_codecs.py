"""One contract over all codecs, each against a naive version, and error feedback."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.codecs import CODECS, encode_with_feedback, get_codec
from farflung.core.codecs.base import STRIP
from farflung.core.codecs.blockwise import E3M0, TINY, Int8
from farflung.methods import make_method

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = st.one_of(st.integers(0, 600), st.sampled_from([255, 256, 257, 511, 512, 513, 4096, 5001]))
SPARSE = {
    name: get_codec(name)
    for name in (
        "top64-2bit-12bit",
        "top9-fp32-gaps-chunk128",
        "dct-top32-int8-12bit",
        "dct-top5-bf16-u16-chunk64",
        "dct-random16-int4-chunk256",
        "rows64-1bit-chunk512",
        "dct-all-int8",
    )
}
EVERY = CODECS | SPARSE
every_codec = pytest.mark.parametrize("codec", EVERY.values(), ids=EVERY)
dense_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def _vector(size, seed=0, scale=1.0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=rng) * torch.rand(size, generator=rng) ** 4 * scale


def _bytes(payload):
    return bytes(payload.tolist())


# Naive versions: one element at a time, straight from the docstrings


def _fp32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def _naive_blocks(x, top):
    """(scale, fp32 quotients) of every block of 256."""
    for start in range(0, len(x), 256):
        block = x[start : start + 256].tolist()
        largest = max(map(abs, block))
        scale = 0.0 if largest < TINY else _fp32(largest / top)
        yield scale, [_fp32(v / (scale or 1.0)) for v in block]


def _naive_int8(x):
    blocks = list(_naive_blocks(x, 127))
    scales = b"".join(struct.pack("<f", scale) for scale, _ in blocks)
    return scales + b"".join(struct.pack("<b", round(q)) for _, quotients in blocks for q in quotients)


def _naive_int4(x):
    values = [0.0] + [2.0 ** (e - 7) for e in range(1, 8)]
    codes, scales = [], b""
    for scale, quotients in _naive_blocks(x, 1):
        scales += struct.pack("<f", scale)
        for q in quotients:
            nearest = min(range(8), key=lambda e: (abs(abs(q) - values[e]), -e))
            codes.append(nearest + (8 if math.copysign(1.0, q) < 0 else 0))
    codes += [0] * (len(codes) % 2)
    return scales + bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))


def _naive_bf16(x):
    def one(v):
        (bits,) = struct.unpack("<I", struct.pack("<f", v))
        return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)

    return b"".join(map(one, x.tolist()))


NAIVE = {
    "fp32": lambda x: struct.pack(f"<{len(x)}f", *x.tolist()),
    "bf16": _naive_bf16,
    "int8": _naive_int8,
    "int4": _naive_int4,
}


# The contract


@pytest.mark.parametrize("codec", [CODECS[name] for name in NAIVE], ids=NAIVE)
@given(size=SIZES, seed=st.integers(0, 99), scale=st.sampled_from([1e-44, 1e-32, 1e-6, 1.0, 1e30]))
@settings(deadline=None, max_examples=25)
def test_payload_equals_the_naive_version_byte_for_byte(codec, size, seed, scale):
    x = _vector(size, seed, scale)
    payload = codec.encode(x)
    assert payload.dtype == torch.uint8
    assert payload.numel() == codec.size_bytes(size)
    assert _bytes(payload) == NAIVE[codec.name](x)


@every_codec
@given(size=SIZES, seed=st.integers(0, 99))
@settings(deadline=None, max_examples=25)
def test_given_buffers_and_any_address_give_the_same_bits(codec, size, seed):
    x = _vector(size, seed)
    payload = codec.encode(x)
    y = codec.decode(payload, size)
    out = torch.full((payload.numel() + 3,), 255, dtype=torch.uint8)[3:]
    assert codec.encode(x, out) is out
    assert torch.equal(out, payload)
    assert torch.equal(codec.decode(out, size), y)
    if size:
        raw = bytearray(b"???" + _bytes(payload))
        assert torch.equal(codec.decode(torch.frombuffer(raw, dtype=torch.uint8, offset=3), size), y)
    target = torch.full((size + 1,), math.nan)[1:]
    assert codec.decode(payload, size, target) is target
    assert torch.equal(target, y)


@dense_codec  # sparse ones have chunks of their own: test_sparse_codecs.py
@pytest.mark.parametrize("size", [STRIP, STRIP + 300, 2 * STRIP + 1])
def test_long_vectors_are_coded_like_their_parts(codec, size):
    x = _vector(size)
    y = codec.decode(codec.encode(x), size)
    for part in (slice(0, 512), slice(STRIP - 256, STRIP), slice(STRIP, size)):
        assert torch.equal(y[part], codec.decode(codec.encode(x[part]), len(x[part])))


@dense_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 255, 256, 599])
def test_what_was_not_finite_decodes_to_something_not_finite_in_its_block(codec, bad, at):
    x = _vector(600)
    x[at] = bad
    finite = torch.isfinite(codec.decode(codec.encode(x), 600))
    block = slice(at // 256 * 256, at // 256 * 256 + 256)
    assert not finite[block].all()
    finite[block] = True
    assert finite.all()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_codes_of_a_non_finite_block_are_zeros_on_every_machine(name):
    payload = get_codec(name).encode(torch.tensor([1.0, math.nan, math.inf, -1.0]))
    assert not payload[4:].any()


@every_codec
@pytest.mark.parametrize("size", [1, 300])
def test_zeros_and_subnormal_numbers_are_harmless(codec, size):
    for value in (0.0, 1e-45, 1e-40, -1e-38):
        x = torch.full((size,), value)
        y = codec.decode(codec.encode(x), size)
        assert (y - x).abs().max() <= TINY


@every_codec
def test_sizes_and_types_that_do_not_fit_are_refused(codec):
    payload = codec.encode(torch.ones(300))
    for call in (
        lambda: codec.decode(payload[:-1], 300),
        lambda: codec.decode(payload, 9000),
        lambda: codec.decode(payload.float(), 300),
        lambda: codec.decode(payload, 300, torch.empty(299)),
        lambda: codec.encode(torch.ones(300).double()),
        lambda: codec.encode(torch.ones(600)[::2]),
        lambda: codec.encode(torch.ones(2, 150)),
        lambda: codec.encode(torch.ones(300), payload[:-1]),
    ):
        with pytest.raises(ValueError, match=r"must be|elements"):
            call()


# What each promises


def _blocks(x):
    return x.view(-1, 256)


def test_fp32_returns_the_same_bits():
    x = _vector(1000)
    assert torch.equal(get_codec("fp32").decode(get_codec("fp32").encode(x), 1000), x)


def test_errors_stay_within_the_stated_bounds():
    x = _vector(256 * 40)
    top = _blocks(x).abs().amax(1, keepdim=True)
    error = {name: (codec.decode(codec.encode(x), len(x)) - x).abs() for name, codec in CODECS.items()}
    assert (error["bf16"] <= 2**-8 * x.abs()).all()
    assert (_blocks(error["int8"]) <= top / 254 * 1.0001).all()
    bound = torch.maximum(_blocks(x).abs() / 3, top / 128)
    assert (_blocks(error["int4"]) <= bound * 1.0001).all()


def test_int4_rounds_ties_up_and_codes_every_value_exactly():
    codec = E3M0()
    values = [0.0] + [2.0**-k for k in range(7)]
    x = torch.tensor(values + [-v for v in values])
    assert torch.equal(codec.decode(codec.encode(x), 16), x)
    ties = torch.tensor([1.0, 0.75, 0.375, -0.75, 2**-7, 1.5 * 2**-6])
    rounded = torch.tensor([1.0, 1.0, 0.5, -1.0, 2**-6, 2**-5])
    assert torch.equal(codec.decode(codec.encode(ties), 6), rounded)
    below = torch.nextafter(ties, torch.zeros(6))[1:]
    rounded_down = torch.tensor([1.0, 0.5, 0.25, -0.5, 0.0, 2**-6])
    assert torch.equal(codec.decode(codec.encode(torch.cat([ties[:1], below])), 6), rounded_down)


def test_blocks_of_other_sizes_work_and_bad_ones_are_refused():
    x = _vector(777)
    for codec in (Int8(block=2), Int8(block=32), E3M0(block=2), E3M0(block=1024)):
        payload = codec.encode(x)
        assert payload.numel() == codec.size_bytes(777)
        assert (codec.decode(payload, 777) - x).abs().max() <= x.abs().max() / 3
    for block in (0, 1, 3, 2 * STRIP):
        with pytest.raises(ValueError, match="power of two"):
            E3M0(block=block)


def test_unknown_codec_gets_a_hint():
    with pytest.raises(ValueError, match="did you mean 'int8'"):
        get_codec("int_8")


# Error feedback


@every_codec
def test_feedback_telescopes(codec):
    residual, sent, total = torch.zeros(700), torch.zeros(700).double(), torch.zeros(700).double()
    for seed in range(50):
        x = _vector(700, seed)
        payload, residual = encode_with_feedback(codec, x, residual)
        sent += codec.decode(payload, 700).double()
        total += x.double()
    assert ((sent + residual.double()) - total).norm() / total.norm() < 1e-6


def test_feedback_leaves_its_inputs_alone_and_is_zero_when_nothing_is_lost():
    x, residual = _vector(100), torch.zeros(100)
    before = x.clone()
    _, new = encode_with_feedback(get_codec("fp32"), x, residual)
    assert not new.any()
    assert torch.equal(x, before)
    assert not residual.any()
    with pytest.raises(ValueError, match="shape"):
        encode_with_feedback(get_codec("fp32"), x, torch.zeros(1))


def test_feedback_sends_small_values_that_the_codec_alone_drops_for_ever():
    codec, x = get_codec("int4"), torch.tensor([1.0, 0.005])
    residual, sent = torch.zeros(2), torch.zeros(2)
    for _ in range(100):
        payload, residual = encode_with_feedback(codec, x, residual)
        sent += codec.decode(payload, 2)
    assert codec.decode(codec.encode(x), 2)[1] == 0.0
    assert sent[1].item() == pytest.approx(0.5, abs=0.02)


def test_an_unknown_codec_is_told_by_the_key_that_named_it_and_sparse_ones_are_shown() -> None:
    with pytest.raises(
        ValueError, match=r"^downlink_codec = 'zzz' .*fp32.* or a sparse one such as .*dct-top32"
    ):
        get_codec("zzz", "downlink_codec")
    with pytest.raises(ValueError, match=r"^downlink_codec = 'top-x'"):
        get_codec("top-x", "downlink_codec")
    with pytest.raises(ValueError, match="downlink_codec = 'int5' is unknown"):
        make_method("decoupled", downlink_codec="int5")
