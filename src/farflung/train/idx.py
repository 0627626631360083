"""IDX, the file format of MNIST and its relatives: unsigned bytes in any number of dimensions.

    0 0 | type: 8 is an unsigned byte | number of dimensions | each dimension, 4 bytes, big-endian | the bytes

A file may be compressed by gzip, whatever its name says.
"""

import gzip
import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from farflung.errors import UserError

UNSIGNED_BYTE = 8
_GZIP = b"\x1f\x8b"
_MAGIC_BYTES = 4
_DIM_BYTES = 4


def read_idx(path: Path, num_dims: int) -> Tensor:
    """Return the values of an IDX file, uint8 with ``num_dims`` dimensions.

    Raises:
        UserError: the file is missing, unreadable, damaged, of another kind, or of another size than its
            header says.
    """
    raw = _content(path)
    _check_magic(path, raw[:_MAGIC_BYTES], num_dims)
    start = _MAGIC_BYTES + _DIM_BYTES * num_dims
    if len(raw) < start:
        raise UserError(f"{path}: cut off in its header, after {len(raw)} bytes: fetch it again")
    dims = [int.from_bytes(raw[i : i + _DIM_BYTES], "big") for i in range(_MAGIC_BYTES, start, _DIM_BYTES)]
    promised, there = math.prod(dims), len(raw) - start
    if promised != there:
        raise UserError(
            f"{path}: {'cut off' if there < promised else 'too long'}: its header promises "
            f"{' x '.join(map(str, dims))} = {promised} bytes, {there} follow: fetch it again"
        )
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)[start:].view(dims)


def _check_magic(path: Path, magic: bytes, num_dims: int) -> None:
    expected = bytes([0, 0, UNSIGNED_BYTE, num_dims])
    if magic == expected:
        return
    why = "not an IDX file"
    if magic[:2] == b"\0\0" and len(magic) == _MAGIC_BYTES:
        if magic[2] == UNSIGNED_BYTE:
            why = f"an IDX file of {magic[3]} dimensions, {num_dims} are expected (3: images, 1: labels)"
        else:
            why = f"an IDX file of type {magic[2]:#04x}, only unsigned bytes (0x08) are read"
    raise UserError(
        f"{path}: {why}: it begins with {magic.hex(' ') or 'nothing'}, should be {expected.hex(' ')}"
    )


def _content(path: Path) -> bytes:
    """All bytes, decompressed."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: give a readable IDX file") from None
    if not raw.startswith(_GZIP):
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(f"{path}: damaged gzip ({error}): fetch it again") from None
