"""The 2-bit and the 1-bit codec: against naive versions, exact sizes, and what each promises.

The contract that all codecs share is in test_codecs.py.
"""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.codecs import CODECS, encode_with_feedback
from farflung.core.codecs.base import STRIP
from farflung.core.codecs.blockwise import TINY
from farflung.core.codecs.low_bit import OneBit, TwoBit

SIZES = st.one_of(st.integers(0, 600), st.sampled_from([255, 256, 257, 511, 512, 513, 1100]))
both = pytest.mark.parametrize("codec", [TwoBit(), OneBit()], ids=["2bit", "1bit"])


def _vector(size, seed=0, scale=1.0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=rng) * torch.rand(size, generator=rng) ** 2 * scale


# Naive versions: one element at a time, straight from the docstrings


def _blocks(x, block):
    values = x.tolist()
    return [values[at : at + block] for at in range(0, len(values), block)]


def _bf16(value):
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def _packed(codes, bits):
    per_byte = 8 // bits
    codes = codes + [0] * (-len(codes) % per_byte)
    groups = [codes[at : at + per_byte] for at in range(0, len(codes), per_byte)]
    return bytes(sum(code << bits * place for place, code in enumerate(group)) for group in groups)


def _naive_2bit(x, block=256):
    stats, codes = b"", []
    for values in _blocks(x, block):
        mean = math.fsum(values) / len(values)
        width = 1.5 * math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
        code = [(v >= mean - width) + (v >= mean) + (v >= mean + width) for v in values]
        bins = [[v for v, c in zip(values, code, strict=True) if c == b] for b in range(4)]
        dead = max(map(abs, values)) < TINY
        stats += b"".join(_bf16(0.0 if dead or not b else math.fsum(b) / len(b)) for b in bins)
        codes += code
    return stats + _packed(codes, 2)


def _naive_1bit(x, block=256):
    stats, codes = b"", []
    for values in _blocks(x, block):
        dead = max(map(abs, values)) < TINY
        stats += struct.pack("<f", 0.0 if dead else math.fsum(map(abs, values)) / len(values))
        codes += [int(math.copysign(1.0, v) < 0) for v in values]
    return stats + _packed(codes, 1)


NAIVE = {"2bit": _naive_2bit, "1bit": _naive_1bit}


@both
@given(size=SIZES, seed=st.integers(0, 99), scale=st.sampled_from([1e-32, 1e-6, 1.0, 1e30]))
@settings(deadline=None, max_examples=25)
def test_payload_equals_the_naive_version_byte_for_byte(codec, size, seed, scale):
    x = _vector(size, seed, scale)
    payload = codec.encode(x)
    assert payload.numel() == codec.size_bytes(size)
    assert bytes(payload.tolist()) == NAIVE[codec.name](x)


@both
@pytest.mark.parametrize("block", [8, 64, 1024])
def test_other_blocks_equal_the_naive_version_too(codec, block):
    codec, x = type(codec)(block=block), _vector(777)
    payload = codec.encode(x)
    assert bytes(payload.tolist()) == NAIVE[codec.name](x, block)
    assert payload.numel() == codec.size_bytes(777)


@both
def test_both_are_found_by_their_names(codec):
    assert CODECS[codec.name] == codec


def test_sizes_are_two_and_a_quarter_bits_and_one_and_an_eighth():
    assert TwoBit().size_bytes(2**20) * 8 == 2.25 * 2**20
    assert OneBit().size_bytes(2**20) * 8 == 1.125 * 2**20
    assert [TwoBit().size_bytes(n) for n in (0, 1, 4, 5, 257)] == [0, 9, 9, 10, 81]
    assert [OneBit().size_bytes(n) for n in (0, 1, 8, 9, 257)] == [0, 5, 5, 6, 41]


@both
@pytest.mark.parametrize("block", [0, 4, 12, 2 * STRIP])
def test_blocks_that_do_not_fill_bytes_or_strips_are_refused(codec, block):
    with pytest.raises(ValueError, match="power of two"):
        type(codec)(block=block)


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_has_no_finite_value_and_codes_of_zero(codec, bad):
    x = _vector(700)
    x[300] = bad
    payload = codec.encode(x)
    y = codec.decode(payload, 700)
    assert not torch.isfinite(y[256:512]).any()
    assert torch.equal(y[:256], codec.decode(codec.encode(x[:256]), 256))
    assert torch.equal(y[512:], codec.decode(codec.encode(x[512:]), 188))
    bits, stat_bytes = (2, 8) if codec.name == "2bit" else (1, 4)
    codes = payload[3 * stat_bytes :]
    assert not codes[256 * bits // 8 : 512 * bits // 8].any()


@both
def test_what_is_large_but_finite_stays_finite(codec):
    x = torch.full((256,), 2.0**127)
    x[::2] *= -1
    assert torch.equal(codec.decode(codec.encode(x), 256), x)


@given(size=st.integers(1, 700), seed=st.integers(0, 999))
@settings(deadline=None, max_examples=50)
def test_bin_means_keep_the_mean_of_a_block_and_add_no_energy(size, seed):
    codec, x = TwoBit(), _vector(size, seed)
    y = codec.decode(codec.encode(x), size)
    for a, b in zip(torch.split(x, 256), torch.split(y, 256), strict=True):
        rounding = 2**-8 * a.abs().mean().item() + 1e-12
        assert abs(a.mean() - b.mean()).item() <= rounding
        assert (a - b).norm() <= (a - a.mean()).norm() * 1.001 + rounding * 16


def test_few_different_values_are_exact_in_two_bits():
    for values in ([5.0], [1.0, -1.0], [0.0] * 9 + [4.0]):
        x = torch.tensor(values * 20)
        assert torch.equal(TwoBit().decode(TwoBit().encode(x), len(x)), x)


@given(size=st.integers(1, 256), seed=st.integers(0, 999), other=st.floats(0.5, 1.5))
@settings(deadline=None, max_examples=50)
def test_no_other_magnitude_has_less_error_in_one_bit(size, seed, other):
    codec, x = OneBit(), _vector(size, seed)
    y = codec.decode(codec.encode(x), size)
    assert torch.equal(torch.signbit(y), torch.signbit(x))
    assert (x - y).norm() <= (x - other * y).norm() + 1e-6


def test_errors_on_normal_numbers_are_as_stated():
    x = torch.randn(256 * 400, generator=torch.Generator().manual_seed(0))
    error = {c.name: ((c.decode(c.encode(x), len(x)) - x).norm() / x.norm()).item() for c in CODECS.values()}
    assert error["2bit"] == pytest.approx(0.40, abs=0.01)
    assert error["1bit"] == pytest.approx(math.sqrt(1 - 2 / math.pi), abs=0.01)
    assert error["int4"] < error["2bit"] < error["1bit"]


@both
def test_with_feedback_nothing_is_lost_for_ever(codec):
    """The residual stays bounded, so what was sent on average approaches what was meant."""
    x, residual, sent = _vector(512), torch.zeros(512), torch.zeros(512)
    for _ in range(200):
        payload, residual = encode_with_feedback(codec, x, residual)
        sent += codec.decode(payload, 512)
    assert (sent / 200 - x).norm() < 0.2 * x.norm()
