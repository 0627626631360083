"""The orthonormal DCT-II of small matrices, as two matrix products: fast where the sides are at most 64.

``C = B_h X B_w^T``, ``X = B_h^T C B_w``, with ``B[k, i] = c_k cos(pi (i + 1/2) k / n)``, ``c_0 = sqrt(1/n)``,
else ``c_k = sqrt(2/n)``. B is orthonormal, so a coefficient's square is its share of the energy. Any side
works, odd, prime and 1 too. The basis is computed in float64 and kept in fp32 (a bf16 basis is not
orthonormal). Legend: n matrices of h rows and w columns.
"""

import math
from functools import cache

import torch
from torch import Tensor

SIDE = 64
"""Largest side of a chunk (arXiv 2510.03371's code, DeMo: at most 64 x 64, or 64 for vectors)."""


def dct(x_nhw: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """Coefficients of n contiguous fp32 matrices.

    Products that PyTorch was told to round (TF32, bf16, autocast) are made in float64 instead. The last bits
    depend on the machine: what must be equal everywhere is published after the inverse, or in coefficients.

    Args:
        x_nhw: magnitudes up to 2^120; a matrix that is not finite has no finite coefficient.
        out, scratch: memory of the same shape, overwritten; ``out`` is returned.

    >>> dct(torch.ones(1, 2, 2)).round().abs()
    tensor([[[2., 0.],
             [0., 0.]]])
    """
    return _transformed(x_nhw, False, out, scratch)


def idct(coef_nhw: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """The matrices that have these coefficients: the inverse and transpose of `dct`."""
    return _transformed(coef_nhw, True, out, scratch)


def dct_plain(x_nhw: Tensor) -> Tensor:
    """`dct` as its formula, in the dtype of ``x``."""
    h, w = x_nhw.shape[1:]
    return basis(h, x_nhw.dtype, x_nhw.device) @ x_nhw @ basis(w, x_nhw.dtype, x_nhw.device).T


def idct_plain(coef_nhw: Tensor) -> Tensor:
    """`idct` as its formula, in the dtype of ``coef``."""
    h, w = coef_nhw.shape[1:]
    return basis(h, coef_nhw.dtype, coef_nhw.device).T @ coef_nhw @ basis(w, coef_nhw.dtype, coef_nhw.device)


@cache
def basis(side: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """B, ``[side, side]``: row k is the k-th cosine. Not to be written."""
    i = torch.arange(side, dtype=torch.float64)
    rows = torch.cos(math.pi / side * (i[None] + 0.5) * i[:, None]) * math.sqrt(2 / side)
    rows[0] /= math.sqrt(2)
    return rows.to(dtype).to(device)


def _transformed(x_nhw: Tensor, inverse: bool, out: Tensor | None, scratch: Tensor | None) -> Tensor:
    out = torch.empty_like(x_nhw) if out is None else out
    if _products_are_rounded(x_nhw.device):
        plain = idct_plain if inverse else dct_plain
        return out.copy_(plain(x_nhw.double()))
    n, h, w = x_nhw.shape
    left, right = (basis(side, x_nhw.dtype, x_nhw.device) for side in (h, w))
    if inverse:
        left, right = left.T, right.T
    half = out if h == 1 else torch.empty_like(x_nhw) if scratch is None else scratch
    torch.mm(x_nhw.view(n * h, w), right.T, out=half.view(n * h, w))
    return half if h == 1 else torch.bmm(left.expand(n, h, h), half, out=out)


def _products_are_rounded(device: torch.device) -> bool:
    """Whether a product of fp32 matrices may be made with fewer bits here."""
    try:
        exact = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # it was set for one backend, by the newer interface
        exact = False
    return not exact or torch.is_autocast_enabled(device.type)
