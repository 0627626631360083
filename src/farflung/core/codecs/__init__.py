"""Codecs: how a fp32 vector travels. Each is a frozen value with `Codec`'s four members.

``"fp32"`` and ``"bf16"`` cast; ``"int8"`` and ``"int4"`` share one scale per block; ``"2bit"`` and ``"1bit"``
share a block's bin means or mean magnitude. All are deterministic, keep nothing between calls (error feedback
is a wrapper, see `feedback`), and never hide a NaN or infinity: what was not finite when encoded is not
finite when decoded. Bytes are little-endian.
"""

from farflung.core.codecs.base import Codec
from farflung.core.codecs.blockwise import E3M0, Int8
from farflung.core.codecs.cast import BF16, FP32
from farflung.core.codecs.feedback import encode_with_feedback
from farflung.core.codecs.low_bit import OneBit, TwoBit
from farflung.errors import did_you_mean

CODECS: dict[str, Codec] = {codec.name: codec for codec in (FP32, BF16, Int8(), E3M0(), TwoBit(), OneBit())}
"""Name in a recipe and on the wire -> codec."""


def get_codec(name: str) -> Codec:
    """Look a codec up by name.

    Raises:
        ValueError: unknown name.

    >>> get_codec("int4").size_bytes(1024)
    528
    """
    if name not in CODECS:
        raise ValueError(f"codec = {name!r} is unknown{did_you_mean(name, CODECS)}")
    return CODECS[name]


__all__ = ["CODECS", "Codec", "encode_with_feedback", "get_codec"]
