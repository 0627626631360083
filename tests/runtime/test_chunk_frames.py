import pytest

from farflung.runtime import chunks
from farflung.units import CHUNK_BYTES, MIB

BODY = b"the quick brown fox"
NUM_BYTES = len(BODY)


def frame(index=0, total_bytes=NUM_BYTES, checksum=None):
    return chunks.header(index, total_bytes, chunks.checksum(BODY) if checksum is None else checksum)


def test_chunks_cover_an_object_without_gap_or_overlap():
    parts = chunks.split(2 * CHUNK_BYTES + 5)
    assert parts == [
        (0, 0, CHUNK_BYTES),
        (1, CHUNK_BYTES, 2 * CHUNK_BYTES),
        (2, 2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 5),
    ]


def test_an_empty_object_has_one_empty_chunk():
    assert chunks.split(0) == [(0, 0, 0)]


def test_a_full_last_chunk_is_not_followed_by_an_empty_one():
    assert len(chunks.split(CHUNK_BYTES)) == 1


def test_no_chunk_exceeds_eight_mib_and_the_header_forty_bytes():
    assert max(stop - start for _, start, stop in chunks.split(100 * MIB)) == 8 * MIB
    assert len(frame()) == chunks.HEADER_BYTES <= 40


def test_a_header_says_where_its_body_belongs():
    chunk = chunks.parse(frame(index=1, total_bytes=CHUNK_BYTES + 7))
    assert (chunk.index, chunk.num_chunks, chunk.num_bytes, chunk.total_bytes) == (1, 2, 7, CHUNK_BYTES + 7)
    assert (chunk.start, chunk.stop) == (CHUNK_BYTES, CHUNK_BYTES + 7)


def test_an_object_of_terabytes_fits_the_header():
    total_bytes = 5 * 2**40 + 3
    assert chunks.parse(frame(index=655360, total_bytes=total_bytes)).num_bytes == 3


def test_an_intact_body_passes_and_a_damaged_one_is_told():
    chunk = chunks.parse(frame())
    chunk.verify(chunks.checksum(BODY))
    with pytest.raises(ValueError, match="chunk 0: checksum"):
        chunk.verify(chunks.checksum(b"x" + BODY[1:]))


@pytest.mark.parametrize(
    "data, complaint",
    [
        (b"", "0 bytes instead of 36"),
        (b"GET " + frame()[4:], "magic b'GET '"),
        (frame()[:4] + b"\x09" + frame()[5:], "version 9"),
        (frame()[:8] + b"\x05" + frame()[9:], "index 5 of 1 chunks"),
        (frame()[:12] + b"\x02" + frame()[13:], "of 2 chunks"),
        (frame()[:16] + b"\x01" + frame()[17:], "body of 1 bytes"),
    ],
)
def test_a_malformed_header_is_refused_in_one_line(data, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        chunks.parse(data)
    assert "\n" not in str(caught.value)
