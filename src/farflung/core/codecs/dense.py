"""The dense codecs by name: those that send every element."""

from dataclasses import replace
from typing import Any

from farflung.core.codecs.base import Codec
from farflung.core.codecs.blockwise import E3M0, Int8
from farflung.core.codecs.cast import BF16, FP32
from farflung.core.codecs.low_bit import OneBit, TwoBit
from farflung.errors import did_you_mean

CODECS: dict[str, Codec] = {codec.name: codec for codec in (FP32, BF16, Int8(), E3M0(), TwoBit(), OneBit())}
"""Name in a recipe and on the wire -> codec."""


def dense_codec(name: str) -> Codec:
    """A codec by its name, which may say how many elements share statistics: ``"2bitx4096"``.

    Raises:
        ValueError: unknown name, or a block that the codec refuses or has not.

    >>> dense_codec("int8x32").size_bytes(64)
    72
    """
    base, _, block = name.partition("x")
    if base not in CODECS:
        raise ValueError(f"{name!r} is unknown{did_you_mean(base, CODECS)}")
    codec: Any = CODECS[base]
    if not block and name == base:
        return CODECS[base]
    if not (block.isdecimal() and hasattr(codec, "block")):
        raise ValueError(f"{name!r}: {base} has no block {block!r}")
    return replace(codec, block=int(block))  # type: ignore[no-any-return]


def dense_name(codec: Codec) -> str:
    """The name from which `dense_codec` makes this codec."""
    usual = CODECS.get(codec.name) == codec
    return codec.name if usual else f"{codec.name}x{getattr(codec, 'block', '?')}"
