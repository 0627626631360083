"""Packing and unpacking one fp32 vector, and the transform of some codecs alone."""

import math
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from farflung.bench.measure import Measurement, Settings, interleave, speed_of
from farflung.bench.memory import against_copy
from farflung.core.codecs import CODECS, get_codec
from farflung.core.codecs.base import STRIP
from farflung.core.codecs.dct import SIDE, dct

MEASURED = (*CODECS, "top64-2bit-12bit", "dct-top32-int8-12bit", "dct-top32-int8-gaps", "random64-bf16")
"""The dense codecs; SparseLoCo's, DCT momentum's with both forms of positions, and a draw."""


def measure_encode(settings: Settings, name: str) -> Measurement:
    """fp32 vector -> payload, into a reused buffer."""
    codec, vector = get_codec(name), _vector(settings)
    payload = codec.encode(vector)
    what = f"fp32 vector to {name} payload: bytes/s, vector read and payload written"
    touched = settings.vector_bytes + len(payload)
    return against_copy(settings, lambda: codec.encode(vector, out=payload), touched, what)


def measure_decode(settings: Settings, name: str) -> Measurement:
    """Payload -> fp32 vector, into a reused buffer."""
    codec, vector = get_codec(name), _vector(settings)
    payload, size = codec.encode(vector), vector.numel()
    what = f"{name} payload to fp32 vector: bytes/s, payload read and vector written"
    touched = settings.vector_bytes + len(payload)
    return against_copy(settings, lambda: codec.decode(payload, size, out=vector), touched, what)


def measure_dct(settings: Settings) -> Measurement:
    """The DCT of 64 x 64 chunks by matrix products, against the same by FFT as torch-dct makes it.

    If scipy is installed, the note says how its DCT compares: more than 0.5 is what we want.
    """
    out, scratch = torch.empty(2, STRIP // SIDE**2, SIDE, SIDE)
    ours = _speed(settings, lambda strip: dct(strip, out[: len(strip)], scratch[: len(strip)]))
    peer = _speed(settings, _dct_by_fft)
    for warm_up in (ours, peer):
        warm_up()
    ratios, reference = interleave(ours, peer, settings.repetitions)
    return Measurement(
        ratios=ratios,
        reference=reference / 1e9,
        unit="GB/s",
        what="DCT of 64 x 64 chunks by matrix products, against torch-dct's formulation by FFT",
        aim=1.0,
        note=_against_scipy(settings, ours),
    )


def _against_scipy(settings: Settings, ours: Callable[[], float]) -> str:
    try:
        from scipy.fft import dctn  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return "scipy is not installed"
    scipy = _speed(settings, lambda strip: dctn(strip.numpy(), axes=(1, 2), norm="ortho"))
    scipy()
    ratios, _ = interleave(ours, scipy, settings.repetitions)
    return f"{median(ratios):.2f} of scipy's speed, aim 0.5"


def _speed(settings: Settings, transform: Callable[[Tensor], object]) -> Callable[[], float]:
    """Bytes/s read and written, strip by strip: intermediate results of all stay in cache."""
    chunks = _vector(settings).view(-1, SIDE, SIDE)

    def work() -> None:
        for strip in torch.split(chunks, STRIP // SIDE**2):
            transform(strip)

    return speed_of(work, 2 * settings.vector_bytes)


def _dct_by_fft(x_nhw: Tensor) -> Tensor:
    """Rows, then columns: as torch-dct 0.1.6 does it (a complex FFT of reordered rows, then a rotation)."""
    return _rows_by_fft(_rows_by_fft(x_nhw).transpose(1, 2)).transpose(1, 2)


def _rows_by_fft(x: Tensor) -> Tensor:
    shape, size = x.shape, x.shape[-1]
    rows = x.reshape(-1, size)
    spectrum = torch.fft.fft(torch.cat([rows[:, ::2], rows[:, 1::2].flip(1)], 1), dim=1)
    angle = -torch.arange(size) * math.pi / (2 * size)
    coef: Tensor = spectrum.real * angle.cos() - spectrum.imag * angle.sin()
    coef[:, 0] /= math.sqrt(size) * 2
    coef[:, 1:] /= math.sqrt(size / 2) * 2
    return coef.mul_(2).view(shape)


def _vector(settings: Settings) -> torch.Tensor:
    return torch.randn(settings.vector_bytes // 4, generator=torch.Generator().manual_seed(0))
