"""A bulk object as independent chunks: where each one lies, and the frame header in front of its body.

Layout of the header, little-endian, HEADER_BYTES long: magic "ffob", u16 version, u16 reserved, u32 chunk
index, u32 number of chunks, u32 body bytes, u64 object bytes, u64 xxh3_64 of the body. No I/O here.
"""

import struct
from dataclasses import dataclass

import xxhash

from farflung.core.traffic import num_chunks
from farflung.units import CHUNK_BYTES, FRAME_BYTES

MAGIC = b"ffob"
VERSION = 1
_HEADER = struct.Struct("<4sHHIIIQQ")
HEADER_BYTES = FRAME_BYTES
assert _HEADER.size == HEADER_BYTES, "units.FRAME_BYTES is what everybody counts with"


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a header says of the body behind it; consistent by construction (`parse`)."""

    index: int
    num_chunks: int
    num_bytes: int  # of the body
    total_bytes: int  # of the whole object
    checksum: int  # xxh3_64 of the body

    @property
    def start(self) -> int:
        return self.index * CHUNK_BYTES

    @property
    def stop(self) -> int:
        return self.start + self.num_bytes

    def verify(self, checksum: int) -> None:
        """Raise ValueError unless the body that arrived has this header's checksum."""
        if checksum != self.checksum:
            raise ValueError(
                f"chunk {self.index}: checksum {checksum:016x} differs from the header's {self.checksum:016x}"
            )


def count(total_bytes: int) -> int:
    """Number of chunks of an object; an empty object still has one, empty chunk.

    >>> count(0), count(CHUNK_BYTES), count(CHUNK_BYTES + 1)
    (1, 1, 2)
    """
    return num_chunks(total_bytes)


def span(index: int, total_bytes: int) -> tuple[int, int]:
    """First byte of one chunk and the byte behind its last."""
    start = index * CHUNK_BYTES
    return start, min(total_bytes, start + CHUNK_BYTES)


def split(num_bytes: int) -> list[tuple[int, int, int]]:
    """(index, start, stop) of every chunk of an object.

    >>> split(0), split(5)
    ([(0, 0, 0)], [(0, 0, 5)])
    """
    return [(index, *span(index, num_bytes)) for index in range(count(num_bytes))]


def checksum(body: bytes | memoryview) -> int:
    """xxh3_64 of a body: about ten times faster than a socket, where crc32 is as slow as one."""
    return xxhash.xxh3_64_intdigest(body)


def header(index: int, total_bytes: int, checksum: int) -> bytes:
    """The frame header of one chunk. The lengths follow from index and total."""
    start, stop = span(index, total_bytes)
    return _HEADER.pack(MAGIC, VERSION, 0, index, count(total_bytes), stop - start, total_bytes, checksum)


def parse(data: bytes) -> Chunk:
    """Read a frame header.

    Raises:
        ValueError: one line; wrong size, magic or version, or lengths that contradict each other.
    """
    if len(data) != HEADER_BYTES:
        raise ValueError(f"chunk header: {len(data)} bytes instead of {HEADER_BYTES}")
    magic, version, _, index, num_chunks, num_bytes, total_bytes, checksum = _HEADER.unpack(data)
    if magic != MAGIC:
        raise ValueError(f"chunk header: magic {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise ValueError(f"chunk header: version {version}, this side speaks {VERSION}")
    if num_chunks != count(total_bytes) or index >= num_chunks:
        raise ValueError(f"chunk header: index {index} of {num_chunks} chunks for {total_bytes} bytes")
    start, stop = span(index, total_bytes)
    if num_bytes != stop - start:
        raise ValueError(f"chunk header: body of {num_bytes} bytes, chunk {index} has {stop - start}")
    return Chunk(index, num_chunks, num_bytes, total_bytes, checksum)
