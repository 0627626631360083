"""Codecs: how a fp32 vector travels. Each is a frozen value with `Codec`'s four members.

``"fp32"`` and ``"bf16"`` cast; ``"int8"`` and ``"int4"`` share one scale per block; ``"2bit"`` and ``"1bit"``
share a block's bin means or mean magnitude. Sparse codecs send some coefficients of each chunk, and have names
such as ``"dct-top32-int8-12bit"`` (see `names`). All are deterministic, keep nothing between calls (error
feedback is a wrapper, see `feedback`), and never hide a NaN or infinity: what was not finite when encoded is
not finite when decoded. Bytes are little-endian.
"""

from farflung.core.codecs.base import Codec
from farflung.core.codecs.coefficients import Coefficients, contributor_mean, weighted_sum
from farflung.core.codecs.dense import CODECS
from farflung.core.codecs.feedback import drop_sent, encode_with_feedback, put_back
from farflung.core.codecs.names import sparse_codec
from farflung.core.codecs.sparse import SparseCodec
from farflung.errors import did_you_mean

SPARSE = "or a sparse one such as top64-2bit-12bit, dct-top32-int8-12bit"


def get_codec(name: str, field: str = "codec") -> Codec:
    """Look a codec up by name: one of `CODECS`, or a sparse one. `field` is what a refusal names.

    Raises:
        ValueError: unknown name.

    >>> get_codec("int4").size_bytes(1024)
    528
    >>> get_codec("top64-2bitx4096-12bit").size_bytes(64 * 4096)
    7176
    """
    if name in CODECS:
        return CODECS[name]
    if "-" in name:
        try:
            return sparse_codec(name)
        except ValueError as error:
            raise ValueError(str(error).replace("codec =", f"{field} =", 1)) from None
    hint = did_you_mean(name, CODECS)
    hint = f"{hint[:-1]}, {SPARSE})" if hint.startswith(" (known") else hint
    raise ValueError(f"{field} = {name!r} is unknown{hint}")


__all__ = [
    "CODECS",
    "Codec",
    "Coefficients",
    "SparseCodec",
    "contributor_mean",
    "drop_sent",
    "encode_with_feedback",
    "get_codec",
    "put_back",
    "weighted_sum",
]
