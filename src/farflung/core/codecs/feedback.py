"""What becomes of what a codec sent and of what it dropped: error feedback, and the buffers of momentum."""

from torch import Tensor

from farflung.core.codecs.base import Codec


def encode_with_feedback(codec: Codec, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Encode ``x`` plus what earlier payloads left out.

    ``y = x + r;  payload = encode(y);  r' = y - decode(payload)``

    The residual is taken against the *decoded* payload, so over rounds the sum telescopes:
    ``sum decoded + r_last = r_first + sum x``. The caller commits ``r'`` by the payload's fate: keep the old
    residual if it was not merged. Source: error feedback (Karimireddy et al., arXiv 1901.09847, Algorithm 2).

    Args:
        codec: any codec.
        x: fp32 vector of N elements.
        residual: fp32 vector of N elements; zeros at the start.

    Returns:
        ``(payload, new_residual)`` in new memory. Where the payload is not finite neither is the residual.

    Raises:
        ValueError: shapes differ, or as `Codec.encode`.

    >>> import torch
    >>> from farflung.core.codecs import get_codec
    >>> payload, residual = encode_with_feedback(get_codec("int4"), torch.tensor([8.0, 5.0]), torch.zeros(2))
    >>> residual
    tensor([0., 1.])
    """
    if x.shape != residual.shape:
        raise ValueError(f"x has shape {list(x.shape)}, residual {list(residual.shape)}")
    y = x + residual
    payload = codec.encode(y)
    return payload, y.sub_(codec.decode(payload, y.numel()))


def drop_sent(buffer: Tensor, sent: Tensor) -> Tensor:
    """``m - decoded``: what was sent leaves the buffer, the rest stays for later (DeMo, SparseLoCo).

    With ``buffer`` the vector that was encoded this is `encode_with_feedback`'s residual.

    Args:
        buffer: vector that was encoded, ``[N]``; untouched.
        sent: what others decode of it, ``[N]``.

    >>> import torch
    >>> drop_sent(torch.tensor([3.0, 1.0]), torch.tensor([3.0, 0.0]))
    tensor([0., 1.])
    """
    return buffer - sent


def put_back(buffer: Tensor, mean: Tensor) -> Tensor:
    """``m + mean``: after `drop_sent`, the shared part returns to the buffer (arXiv 2510.03371).

    Over W workers nothing is lost or made where ``mean = sum sent / W``: the sum of all buffers is then what
    it was before. The mean over contributors alone makes more of what few send.

    >>> import torch
    >>> put_back(torch.tensor([0.0, 1.0]), torch.tensor([1.5, 0.0]))
    tensor([1.5000, 1.0000])
    """
    return buffer + mean
