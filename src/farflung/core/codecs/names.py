"""Names of sparse codecs: ``[dct-]SELECTION-VALUES[-INDICES][-chunkN][-seedN][-tensors]``.

    top64-2bit-12bit            SparseLoCo: 64 of 4096 elements, 2-bit values, 12-bit positions
    dct-top32-int8-gaps         32 of 64 x 64 DCT coefficients, positions as gaps
    random64-bf16-seed7         64 of 4096 elements that seed 7 draws anew each round, without positions
    rows64-bf16                 one of 64 rows of 64 elements
    dct-all-int4                every coefficient
    dct-top32-fp32-u16-tensors  chunks along tensors, as the authors of arXiv 2510.03371 cut them

VALUES is the name of a dense codec, with its block where it is not the usual one: ``2bitx4096``. INDICES are
for ``top`` only; by default ``12bit``, or ``u16`` where a chunk is too long for that.
"""

import re
from typing import Any

from farflung.core.codecs.dense import dense_codec
from farflung.core.codecs.indices import INDICES
from farflung.core.codecs.sparse import CHUNK, SparseCodec
from farflung.errors import did_you_mean


def sparse_codec(name: str) -> SparseCodec:
    """The codec of a name.

    Raises:
        ValueError: a part is unknown, out of place, or contradicts another: one line that names it.

    >>> sparse_codec("top64-2bit").name
    'top64-2bit-12bit'
    """
    try:
        return SparseCodec(**_fields(name.split("-")))
    except ValueError as error:
        raise ValueError(f"codec = {name!r}: {error}") from error


def _fields(parts: list[str]) -> dict[str, Any]:
    dct = parts[0] == "dct"
    chosen, *rest = parts[dct:] or [""]
    found = re.fullmatch(r"(top|random|rows)([1-9]\d{0,8})|(all)", chosen)
    if found is None:
        raise ValueError(f"{chosen!r} is no selection (known: all, random64, rows64, top64)")
    if not rest:
        raise ValueError(f"{chosen!r} wants a format of values behind it, 'int8' for instance")
    select = found[1] or found[3]
    fields: dict[str, Any] = {
        "dct": dct,
        "select": select,
        "k": int(found[2] or 0),
        "values": dense_codec(rest[0]),
    }
    for part in rest[1:]:
        field, value = _option(part)
        if field in fields:
            raise ValueError(f"{part!r}: {field} is said twice")
        fields[field] = value
    if select == "top":
        fields.setdefault("indices", "12bit" if fields.get("chunk", CHUNK) <= CHUNK else "u16")
    return fields


def _option(part: str) -> tuple[str, Any]:
    if part in INDICES:
        return "indices", part
    if part == "tensors":
        return "tensors", True
    numbered = re.fullmatch(r"(chunk|seed)(\d{1,20})", part)
    if numbered is None:
        raise ValueError(
            f"{part!r} is unknown{did_you_mean(part, [*INDICES, 'chunk64', 'seed1', 'tensors'])}"
        )
    return numbered[1], int(numbered[2])
