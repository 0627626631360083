"""Objects that are arriving: chunks in any order, repeated, several at once, resumed after a break.

A chunk that was checked is never written again. When one chunk is sent twice at the same time, as after a
connection that died silently, the newest writer wins and the older one stops at its next piece.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from farflung.runtime.chunks import Chunk, count
from farflung.runtime.transport import Refused

REMEMBERED = 4096  # names of complete objects, to answer a repeated chunk whose answer was lost


@dataclass(slots=True, eq=False)
class Upload:
    buffer: memoryview
    arrived: set[int] = field(default_factory=set)
    writers: dict[int, "Slot"] = field(default_factory=dict)  # the newest one of each chunk


@dataclass(slots=True, eq=False)
class Slot:
    """The right to write one chunk into its place, until somebody newer has it."""

    name: str
    chunk: Chunk
    upload: Upload

    @property
    def view(self) -> memoryview:
        return self.upload.buffer[self.chunk.start : self.chunk.stop]

    def check(self) -> None:
        """Raise Refused when these bytes are no longer wanted."""
        if self.upload.writers.get(self.chunk.index) is not self:
            raise Refused("superseded", f"{self.name}: chunk {self.chunk.index} was taken over")


class Inbox:
    """Receiver buffers by object name. `buffer_for` lends the buffer, `complete` takes it back."""

    def __init__(
        self, buffer_for: Callable[[str, int], memoryview | None], complete: Callable[[str], None]
    ) -> None:
        self._buffer_for = buffer_for
        self._complete = complete
        self._uploads: dict[str, Upload] = {}
        self._finished: dict[str, int] = {}  # name -> bytes, oldest first

    def arrived(self, name: str) -> set[int] | None:
        """Chunks that arrived and were checked; None when nothing is known of this object."""
        if name in self._finished:
            return set(range(count(self._finished[name])))
        upload = self._uploads.get(name)
        return None if upload is None else upload.arrived

    def begin(self, name: str, chunk: Chunk) -> Slot | None:
        """Claim the place of one chunk; None when it already arrived.

        Raises:
            Refused: the backend does not expect the object, or not with this size.
        """
        if self._finished.get(name) == chunk.total_bytes:
            return None
        upload = self._uploads.get(name) or self._open(name, chunk.total_bytes)
        if len(upload.buffer) != chunk.total_bytes:
            raise Refused("size", f"{name}: {chunk.total_bytes} bytes, {len(upload.buffer)} expected")
        if chunk.index in upload.arrived:
            return None
        slot = Slot(name, chunk, upload)
        upload.writers[chunk.index] = slot
        return slot

    def finish(self, slot: Slot, checksum: int) -> None:
        """The body was written; accept it, and complete the object with its last chunk.

        Raises:
            ValueError: the checksum differs; the chunk may be sent again.
            Refused: superseded, or the backend does not like the complete object.
        """
        slot.check()
        del slot.upload.writers[slot.chunk.index]
        slot.chunk.verify(checksum)
        slot.upload.arrived.add(slot.chunk.index)
        if len(slot.upload.arrived) == slot.chunk.num_chunks:
            del self._uploads[slot.name]
            self._complete(slot.name)
            self._remember(slot.name, slot.chunk.total_bytes)

    def forget(self, name: str) -> None:
        """Drop an object, whole or not. Nothing is written into its buffer after this returns."""
        self._finished.pop(name, None)
        upload = self._uploads.pop(name, None)
        if upload is not None:
            upload.writers.clear()

    def _open(self, name: str, total_bytes: int) -> Upload:
        buffer = self._buffer_for(name, total_bytes)
        if buffer is None:
            raise Refused("object", f"{name}: not expected here")
        if len(buffer) != total_bytes or buffer.itemsize != 1:
            raise Refused("size", f"{name}: {total_bytes} bytes, {len(buffer)} expected")
        self._uploads[name] = Upload(buffer)
        return self._uploads[name]

    def _remember(self, name: str, total_bytes: int) -> None:
        self._finished[name] = total_bytes
        if len(self._finished) > REMEMBERED:
            del self._finished[next(iter(self._finished))]
