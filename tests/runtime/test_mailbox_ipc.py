import asyncio
import gc
import os
import socket
import struct
import subprocess
import sys

import msgspec
import pytest

from farflung.ipc.arena import Arena
from farflung.ipc.channel import AsyncChannel, PeerGone, sidecar_channel, trainer_channel
from farflung.protocol.mailbox import Adopt, BoundaryPassed, End, Ended, SaveDone, Seed, Taken


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    trainer, sidecar = trainer_channel(left), sidecar_channel(right)
    yield trainer, sidecar
    trainer.close()
    sidecar.close()


# ---- channel ---------------------------------------------------------------------------------------------


def test_commands_and_reports_cross_in_order(pair):
    trainer, sidecar = pair
    taken = Taken(fragment=0, round=1, base_version=2, steps=3, tokens=4, num_bytes=5)
    reports = [BoundaryPassed(step=1, loss=2.5, taken=[taken]), SaveDone(step=2)]
    for report in reports:
        trainer.send(report)
    sidecar.send(Adopt(fragment=0, version=3, included=None))
    assert sidecar.poll() == reports
    assert trainer.poll() == [Adopt(fragment=0, version=3, included=None)]


def test_polling_an_empty_mailbox_returns_at_once(pair):
    assert pair[0].poll() == []


def test_a_frame_that_arrives_in_parts_is_one_message():
    left, right = socket.socketpair()
    trainer = trainer_channel(left)
    body = msgspec.msgpack.encode(End(reason="done"))
    data = struct.pack("<I", len(body)) + body
    for byte in data[:-1]:
        right.send(bytes([byte]))
        assert trainer.poll() == []
    right.send(data[-1:] + data[:3])
    assert trainer.poll() == [End(reason="done")]
    trainer.close()
    right.close()


def test_send_never_blocks_and_what_is_kept_is_sent_later(pair):
    trainer, sidecar = pair
    sent = [Ended(reason=f"{i}" + "x" * 50_000) for i in range(100)]
    for report in sent:
        trainer.send(report)
    assert trainer.unsent, "the burst is larger than the socket's buffer"
    got = []
    while len(got) < len(sent):
        got += sidecar.poll()
        trainer.flush()
    assert got == sent and not trainer.unsent


def test_wait_returns_when_something_arrives_and_when_the_time_is_over(pair):
    trainer, sidecar = pair
    assert trainer.wait(0.0) == []
    sidecar.send(Seed())
    assert trainer.wait(60.0) == [Seed()]


def test_the_last_words_are_read_before_the_end_is_told(pair):
    trainer, sidecar = pair
    trainer.send(Ended(reason="finished"))
    trainer.close()
    assert sidecar.poll() == [Ended(reason="finished")]
    with pytest.raises(PeerGone, match="closed its mailbox"):
        sidecar.poll()
    with pytest.raises(PeerGone):
        sidecar.wait(60.0)
    with pytest.raises(PeerGone, match="is gone"):
        sidecar.send(Seed())


def test_garbage_lengths_are_not_believed():
    left, right = socket.socketpair()
    trainer = trainer_channel(left)
    right.send(b"\xff\xff\xff\xff")
    with pytest.raises(ValueError, match="mailbox frame"):
        trainer.poll()
    trainer.close()
    right.close()


# ---- served by an event loop -------------------------------------------------------------------------------


async def test_the_sidecar_hears_reports_and_the_end_without_polling(pair):
    trainer, sidecar = pair
    heard: asyncio.Queue = asyncio.Queue()
    mailbox = AsyncChannel(sidecar, heard.put_nowait, heard.put_nowait)
    trainer.send(SaveDone(step=7))
    assert await heard.get() == SaveDone(step=7)
    mailbox.send(Seed())
    assert trainer.wait(60.0) == [Seed()]
    trainer.close()
    assert "closed" in await heard.get()
    mailbox.send(Seed())  # nobody there: no error
    mailbox.close()


async def test_the_sidecar_reads_what_a_dead_trainer_wrote_even_if_it_was_writing_itself(pair):
    trainer, sidecar = pair
    heard: asyncio.Queue = asyncio.Queue()
    mailbox = AsyncChannel(sidecar, heard.put_nowait, heard.put_nowait)
    trainer.send(Ended(reason="finished"))
    trainer.close()
    mailbox.send(Seed())
    assert await heard.get() == Ended(reason="finished")
    assert "closed" in await heard.get()
    mailbox.close()


async def test_a_burst_from_the_sidecar_is_finished_in_the_background(pair):
    trainer, sidecar = pair
    mailbox = AsyncChannel(sidecar, lambda report: None, lambda reason: None)
    for number in range(100):
        mailbox.send(End(reason=f"{number}" + "x" * 50_000))
    got = []
    while len(got) < 100:
        got += trainer.poll()
        await asyncio.sleep(0)
    assert [int(end.reason.rstrip("x")) for end in got] == list(range(100))
    mailbox.close()


# ---- arena -------------------------------------------------------------------------------------------------


def test_two_mappings_of_an_arena_see_the_same_bytes():
    sizes = [100, 0, 64, 5]
    arena = Arena(sizes)
    other = Arena.open(os.dup(arena.fd), sizes)
    for index, size in enumerate(sizes):
        arena.slot(index)[:] = bytes([index + 1]) * size
    assert [bytes(other.slot(i)) for i in range(4)] == [bytes([i + 1]) * size for i, size in enumerate(sizes)]
    arena.close()
    other.close()


def test_slots_start_on_cache_lines_and_do_not_touch():
    import ctypes

    arena = Arena([1, 65, 3])
    addresses = []
    for index in range(3):
        view = arena.slot(index)
        addresses.append(ctypes.addressof(ctypes.c_char.from_buffer(view)))
        del view
    assert [address % 64 for address in addresses] == [0, 0, 0]
    assert [address - addresses[0] for address in addresses] == [0, 64, 192]
    gc.collect()
    arena.close()


def test_memory_is_not_allocated_before_it_is_written():
    arena = Arena([64 * 2**20])
    assert os.fstat(arena.fd).st_blocks == 0
    arena.slot(0)[:4096] = bytes(range(256)) * 16
    assert os.fstat(arena.fd).st_blocks * 512 < 4 * 2**20
    arena.close()


def test_closing_while_a_view_is_held_leaves_the_view_valid():
    arena = Arena([8])
    view = arena.slot(0)
    arena.close()
    arena.close()
    view[:] = b"12345678"
    assert bytes(view) == b"12345678"


def test_an_arena_of_another_size_is_not_mapped():
    arena = Arena([8])
    with pytest.raises(ValueError, match="expected"):
        Arena.open(arena.fd, [8, 8])
    arena.close()


def test_another_process_reaches_arena_and_mailbox_by_descriptor_without_loading_torch():
    arena = Arena([16])
    left, right = socket.socketpair()
    trainer = trainer_channel(left)
    code = (
        "import socket, sys\n"
        "import farflung.runtime.client, farflung.runtime.server\n"
        "from farflung.ipc.arena import Arena\n"
        "from farflung.ipc.channel import sidecar_channel\n"
        "from farflung.protocol.mailbox import End\n"
        "Arena.open(int(sys.argv[1]), [16]).slot(0)[:] = b'sixteen letters!'\n"
        "channel = sidecar_channel(socket.socket(fileno=int(sys.argv[2])))\n"
        "channel.send(End(reason='torch' if 'torch' in sys.modules else 'light'))\n"
        "channel.close()\n"
    )
    fds = (arena.fd, right.fileno())
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, fds)], pass_fds=fds)
    right.close()
    assert trainer.wait(60.0) == [End(reason="light")]
    assert process.wait() == 0
    assert bytes(arena.slot(0)) == b"sixteen letters!"
    with pytest.raises(PeerGone):
        trainer.wait(60.0)
    trainer.close()
    arena.close()
