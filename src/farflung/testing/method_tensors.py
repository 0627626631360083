"""The tensors in what a method takes and gives: found by name, and compared."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from farflung.methods.base import Contribution, Local, State


def tensors(name: str, value: Any) -> dict[str, Tensor]:
    """Every tensor in an argument or a return value, with a name that finds it: ``local.state['m']``."""
    if isinstance(value, Tensor):
        return {name: value}
    parts: dict[str, Any] = {}
    if isinstance(value, dict):
        parts = {f"{name}[{key!r}]": part for key, part in value.items()}
    elif isinstance(value, Local | Contribution):
        parts = {f"{name}.{field.name}": getattr(value, field.name) for field in fields(value)}
    return {found: vector for part, inner in parts.items() for found, vector in tensors(part, inner).items()}


def signature(state: State) -> str:
    sizes = [f"{name} {list(t.shape)} {str(t.dtype)[6:]}" for name, t in sorted(state.items())]
    return ", ".join(sizes)


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> str:
    """Names whose bits are not the same, or that only one of both has."""
    both = one.keys() & other.keys()
    changed = {name for name in both if not same_bits(one[name], other[name])}
    return ", ".join(sorted(changed | (one.keys() ^ other.keys())))


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat = (t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (one, other))
    return torch.equal(*flat)


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6)
