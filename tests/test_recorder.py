"""A tape on a full disk: the machine goes on, and what waited is written in order when there is room."""

import os

from farflung import recorder
from farflung.recorder import PatientFile


def test_what_could_not_be_written_waits_in_order(tmp_path):
    file = PatientFile(tmp_path / "tape")
    for number, full in enumerate([False, True, True, False]):
        file.full = full
        file.write(f"{number}\n")
        file.flush()
    assert file.failed_writes == 2
    file.close()
    assert (tmp_path / "tape").read_text() == "0\n1\n2\n3\n"


def test_a_tape_that_waits_for_too_long_ends_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "MAX_WAITING_BYTES", 10)
    file = PatientFile(tmp_path / "tape")
    file.write("first\n")
    file.flush()
    file.full = True
    for _ in range(3):
        file.write("second\n")
        file.flush()
    file.full = False
    file.write("third\n")
    file.close()
    assert file.ended
    assert (tmp_path / "tape").read_text() == "first\nsecond\nsecond\n"


def test_a_disk_that_is_really_full_raises_nothing():
    if not os.path.exists("/dev/full"):
        return
    file = PatientFile(recorder.Path("/dev/full"))
    file.write("line\n")
    file.flush()
    file.close()
    assert file.failed_writes == 2
