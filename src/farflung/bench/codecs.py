"""Packing and unpacking one fp32 vector."""

import torch

from farflung.bench.measure import Measurement, Settings
from farflung.bench.memory import against_copy
from farflung.core.codecs import CODECS


def measure_encode(settings: Settings, name: str) -> Measurement:
    """fp32 vector -> payload, into a reused buffer."""
    codec, vector = CODECS[name], _vector(settings)
    payload = codec.encode(vector)
    what = f"fp32 vector to {name} payload: bytes/s, vector read and payload written"
    touched = settings.vector_bytes + len(payload)
    return against_copy(settings, lambda: codec.encode(vector, out=payload), touched, what)


def measure_decode(settings: Settings, name: str) -> Measurement:
    """Payload -> fp32 vector, into a reused buffer."""
    codec, vector = CODECS[name], _vector(settings)
    payload, size = codec.encode(vector), vector.numel()
    what = f"{name} payload to fp32 vector: bytes/s, payload read and vector written"
    touched = settings.vector_bytes + len(payload)
    return against_copy(settings, lambda: codec.decode(payload, size, out=vector), touched, what)


def _vector(settings: Settings) -> torch.Tensor:
    return torch.randn(settings.vector_bytes // 4, generator=torch.Generator().manual_seed(0))
