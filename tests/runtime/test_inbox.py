import pytest

from farflung.runtime import chunks
from farflung.runtime.inbox import Inbox
from farflung.runtime.transport import Refused
from farflung.units import CHUNK_BYTES

TOTAL = CHUNK_BYTES + 4
FIRST, LAST = (chunks.parse(chunks.header(i, TOTAL, checksum=7 + i)) for i in (0, 1))


class Run:
    def __init__(self):
        self.buffer = memoryview(bytearray(TOTAL))
        self.lent = []
        self.completed = []

    def buffer_for(self, name, total_bytes):
        self.lent.append(name)
        return None if name == "unknown" else self.buffer


@pytest.fixture
def run():
    return Run()


@pytest.fixture
def inbox(run):
    return Inbox(run.buffer_for, run.completed.append)


def test_an_object_is_complete_when_its_last_chunk_arrived_in_any_order(inbox, run):
    inbox.finish(inbox.begin("a", LAST), 8)
    assert inbox.arrived("a") == {1} and run.completed == []
    inbox.finish(inbox.begin("a", FIRST), 7)
    assert inbox.arrived("a") == {0, 1} and run.completed == ["a"]
    assert run.lent == ["a"], "one buffer for one object"


def test_a_repeated_chunk_is_not_written_again(inbox, run):
    inbox.finish(inbox.begin("a", FIRST), 7)
    assert inbox.begin("a", FIRST) is None
    inbox.finish(inbox.begin("a", LAST), 8)
    assert inbox.begin("a", LAST) is None, "not even when its object is complete"
    assert run.completed == ["a"]


def test_a_damaged_chunk_may_be_sent_again(inbox):
    with pytest.raises(ValueError, match="checksum"):
        inbox.finish(inbox.begin("a", FIRST), 666)
    assert inbox.arrived("a") == set()
    inbox.finish(inbox.begin("a", FIRST), 7)
    assert inbox.arrived("a") == {0}


def test_the_newest_writer_of_a_chunk_wins(inbox):
    older = inbox.begin("a", FIRST)
    newer = inbox.begin("a", FIRST)
    with pytest.raises(Refused, match="taken over"):
        older.check()
    with pytest.raises(Refused, match="taken over"):
        inbox.finish(older, 7)
    inbox.finish(newer, 7)
    assert inbox.arrived("a") == {0}


def test_nothing_is_written_after_an_object_is_forgotten(inbox):
    slot = inbox.begin("a", FIRST)
    inbox.forget("a")
    with pytest.raises(Refused):
        slot.check()
    assert inbox.arrived("a") is None


def test_what_nobody_expects_and_other_sizes_are_refused(inbox):
    with pytest.raises(Refused, match="not expected"):
        inbox.begin("unknown", FIRST)
    with pytest.raises(Refused, match="expected"):
        inbox.begin("a", chunks.parse(chunks.header(0, TOTAL + 1, 0)))
    inbox.begin("a", FIRST)
    with pytest.raises(Refused, match="expected"):
        inbox.begin("a", chunks.parse(chunks.header(0, 3, 0)))
