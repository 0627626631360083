"""Euclidean norms that do not depend on the number of threads or on how a vector is cut into blocks.

A vector is cut into rows of `ROW` elements from its start; a row's norm is one fp32 reduction that is never
split between threads; rows are combined exactly (`math.fsum`). A caller that walks a vector in blocks of
whole rows therefore gets the same bits as one that takes it at once.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

ROW = 4096
"""Elements per row. Below PyTorch's 32768-element grain, so a reduction over one row is never split."""

_BLOCK = 2**16
_TRUSTED = 1e-12
"""Below this norm the squares come near fp32's smallest normal number (1.2e-38): go through fp64."""


def l2_norm(x: Tensor) -> float:
    """``||x||_2``, relative error about 1e-6, no overflow or underflow for any finite fp32 input.

    Args:
        x: fp32 vector, any length, contiguous.

    Returns:
        The norm; inf or NaN when an element is.

    >>> l2_norm(torch.tensor([3.0, 4.0])), l2_norm(torch.tensor([]))
    (5.0, 0.0)
    >>> l2_norm(torch.tensor([3e38, 3e38])) > 4e38  # beyond fp32
    True
    """
    return norm_from_rows(row_norms(x), x)


def row_norms(x: Tensor) -> list[float]:
    """Norm of every row of `ROW` elements, the last one possibly shorter."""
    if x.numel() < ROW:
        return [float(torch.linalg.vector_norm(x))] if x.numel() else []
    whole = x.numel() // ROW * ROW
    norms: list[float] = torch.linalg.vector_norm(x[:whole].view(-1, ROW), dim=1).tolist()
    return norms + row_norms(x[whole:])


def norm_from_rows(rows: Iterable[float], x: Tensor) -> float:
    """`l2_norm` of ``x``, its `row_norms` known: ``x`` is read only if they left fp32's safe range."""
    norm = combine(rows)
    return norm if _TRUSTED < norm < math.inf else _l2_norm_fp64(x)


def combine(norms: Iterable[float]) -> float:
    """Norm of a vector whose parts have these norms; exact in the order of the parts.

    >>> combine([3.0, 4.0])
    5.0
    """
    norms = list(norms)
    if not all(map(math.isfinite, norms)):
        return math.nan if any(map(math.isnan, norms)) else math.inf
    return math.sqrt(math.fsum(n * n for n in norms))


def _l2_norm_fp64(x: Tensor) -> float:
    return combine(
        float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in torch.split(x, _BLOCK)
    )
