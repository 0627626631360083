import asyncio
import os

import aiohttp
import pytest
from aiohttp import web

from farflung.errors import UserError
from farflung.protocol import messages
from farflung.runtime import chunks, server
from farflung.runtime.client import HubClient
from farflung.runtime.transport import Gone, Refused, TransferFailed, Unreachable
from farflung.units import CHUNK_BYTES

TOKEN = "open-sesame"
AUTH = {"Authorization": f"Bearer {TOKEN}"}
BIG = os.urandom(1024) * (2 * CHUNK_BYTES // 1024) + b"tail"  # three chunks


class FakeRun:
    """A backend that keeps everything it is told."""

    def __init__(self):
        self.objects = {}  # name -> bytearray
        self.complete_names = []
        self.refusals = []
        self.links = {}
        self.events: asyncio.Queue = asyncio.Queue()

    def buffer_for(self, name, total_bytes):
        if name == "too-large":
            raise Refused("size", "too-large: 8 bytes expected")
        if name == "unknown":
            return None
        return memoryview(self.objects.setdefault(name, bytearray(total_bytes)))

    def complete(self, name):
        self.complete_names.append(name)

    def source(self, name):
        return memoryview(self.objects[name])

    async def connected(self, connection, link):
        self.links[connection] = link
        self.events.put_nowait(("connected", connection))

    async def message(self, connection, message):
        if message == messages.Leave(reason="defect"):
            raise RuntimeError("a defect")
        self.events.put_nowait((connection, message))

    async def disconnected(self, connection, reason):
        self.events.put_nowait(("disconnected", reason))

    def refused(self, reason, detail):
        self.refusals.append(reason)


@pytest.fixture
def run():
    return FakeRun()


@pytest.fixture
def failing():
    """Requests for these chunk indices fail as often as named here: {index: times}."""
    return {}


@pytest.fixture
async def app(run, failing):
    @web.middleware
    async def fail(request, handler):
        index = int(request.match_info.get("index", -1))
        if failing.get(index):
            failing[index] -= 1
            return server.refusal(503, "busy", "try again")
        return await handler(request)

    async def status(request):
        return web.json_response({"learners": 3})

    app = server.make_app(run, TOKEN, "run-1", [web.get("/status", status)])
    app.middlewares.append(fail)
    return app


@pytest.fixture
async def url(app):
    runner, port = await server.start(app, "127.0.0.1")
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


@pytest.fixture
async def client(url):
    async with HubClient(url, TOKEN, "run-1", learner="ada", backoff_s=(0.0, 0.0)) as client:
        yield client


# ---- bulk ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"x", BIG], ids=["empty", "one byte", "three chunks"])
async def test_an_object_arrives_as_it_was_sent_and_can_be_fetched_again(client, run, data):
    await client.put_object("delta 1/ä", memoryview(data))
    assert run.objects["delta 1/ä"] == data
    assert run.complete_names == ["delta 1/ä"]
    into = bytearray(len(data))
    await client.get_object("delta 1/ä", memoryview(into))
    assert into == data


async def test_both_sides_count_bodies_and_frame_headers(client, app):
    await client.put_object("a", memoryview(bytes(100)))
    await client.get_object("a", memoryview(bytearray(100)))
    framed = 100 + chunks.HEADER_BYTES
    hub = app[server.HUB]
    for traffic in (client.traffic, hub.total, hub.by_learner["ada"]):
        assert (traffic.bytes_up, traffic.bytes_down, traffic.bytes_control) == (framed, framed, 0)


async def test_the_hub_counts_by_learner_kind_of_object_and_fragment(client, app):
    for name in ("contribution.ada.1.3.7", "contribution.ada.1.3.8", "state.x", "contribution.ada.1.03.7"):
        await client.put_object(name, memoryview(bytes(100)))
    framed = 100 + chunks.HEADER_BYTES
    rows = [("contribution", 3, 2 * framed), ("other", 0, framed), ("state", 0, framed)]
    assert app[server.HUB].table.rows() == [
        {"learner": "ada", "kind": kind, "fragment": p, "up": up, "down": 0} for kind, p, up in rows
    ]


async def test_a_failed_chunk_is_tried_again(client, run, failing):
    failing[1] = 2
    await client.put_object("a", memoryview(BIG))
    assert run.objects["a"] == BIG
    failing[0] = 2
    into = bytearray(len(BIG))
    await client.get_object("a", memoryview(into))
    assert into == BIG


async def test_a_chunk_is_given_up_after_the_last_attempt_in_one_line(client, failing):
    failing[1] = 3
    with pytest.raises(TransferFailed, match="put a chunk 1: try again"):
        await client.put_object("a", memoryview(BIG))


async def test_an_upload_that_broke_off_sends_only_what_is_missing(client, run, failing):
    failing[1] = 3
    with pytest.raises(TransferFailed):
        await client.put_object("a", memoryview(BIG), parallel=1)
    before = client.traffic.bytes_up
    await client.put_object("a", memoryview(BIG), parallel=1)
    assert run.objects["a"] == BIG and run.complete_names == ["a"]
    assert client.traffic.bytes_up - before == len(BIG) - CHUNK_BYTES + 2 * chunks.HEADER_BYTES


async def test_a_repeated_upload_changes_nothing(client, run):
    await client.put_object("a", memoryview(b"once"))
    await client.put_object("a", memoryview(b"once"))
    assert run.complete_names == ["a"]


async def test_a_forgotten_object_can_be_uploaded_anew(client, run, app):
    await client.put_object("a", memoryview(b"once"))
    app[server.HUB].inbox.forget("a")
    await client.put_object("a", memoryview(b"more"))
    assert run.objects["a"] == b"more" and run.complete_names == ["a", "a"]


async def test_what_the_backend_does_not_want_is_refused_with_its_reason(client, run):
    with pytest.raises(Refused, match="8 bytes expected"):
        await client.put_object("too-large", memoryview(BIG))
    with pytest.raises(Refused, match="not expected here"):
        await client.put_object("unknown", memoryview(b"abc"))
    assert "size" in run.refusals and "object" in run.refusals


async def test_an_object_that_is_gone_says_so(client):
    with pytest.raises(Gone, match=r"fragment\.0\.1 is not here"):
        await client.get_object("fragment.0.1", memoryview(bytearray(4)))


async def test_an_object_of_another_size_is_not_taken(client, run):
    run.objects["a"] = bytearray(5)
    with pytest.raises(TransferFailed, match="chunk 0 of 5 bytes, not of 4"):
        await client.get_object("a", memoryview(bytearray(4)))


def framed(body, index=0, total_bytes=None, checksum=None):
    checksum = chunks.checksum(body) if checksum is None else checksum
    return chunks.header(index, len(body) if total_bytes is None else total_bytes, checksum) + body


@pytest.mark.parametrize(
    "body, complaint",
    [
        (b"", "body ended after 0 bytes"),
        (b"x" * 100, "magic"),
        (framed(b"abcd", checksum=1), "checksum"),
        (framed(b"abcd")[:-1], "body ended after 3 of 4"),
        (framed(b"abcd") + b"e", "longer than the 4 bytes"),
        (framed(b"abcd", index=1, total_bytes=CHUNK_BYTES + 4), "index 1 under address"),
    ],
)
async def test_a_malformed_chunk_costs_only_its_request(url, run, client, body, complaint):
    async with (
        aiohttp.ClientSession(headers=AUTH) as session,
        session.put(f"{url}/objects/a/0", data=body) as response,
    ):
        answer = await response.json()
        assert response.status == 400
    assert answer["reason"] == "frame" and complaint in answer["detail"]
    assert run.refusals == ["frame"] and run.complete_names == []
    await client.put_object("b", memoryview(b"fine"))
    assert run.complete_names == ["b"]


async def test_a_damaged_download_is_fetched_again():
    answers = [framed(b"abcd", checksum=1), framed(b"ab"), framed(b"abcd")]

    async def serve(request):
        return web.Response(body=answers.pop(0))

    app = web.Application()
    app.router.add_get("/objects/a/0", serve)
    runner, port = await server.start(app, "127.0.0.1")
    into = bytearray(4)
    async with HubClient(f"http://127.0.0.1:{port}", TOKEN, backoff_s=(0.0, 0.0)) as client:
        await client.get_object("a", memoryview(into))
    await runner.cleanup()
    assert into == b"abcd" and answers == []


async def test_a_hub_that_stalls_is_given_up():
    release = asyncio.Event()

    async def serve(request):
        await release.wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/objects/a/0", serve)
    runner, port = await server.start(app, "127.0.0.1")
    async with HubClient(f"http://127.0.0.1:{port}", TOKEN, backoff_s=(), stall_s=0.02) as client:
        with pytest.raises(TransferFailed, match=r"no progress for 0\.02 s"):
            await client.get_object("a", memoryview(bytearray(4)))
    release.set()
    await runner.cleanup()


# ---- who may come in ---------------------------------------------------------------------------------------


async def test_without_the_token_nothing_is_served_and_nothing_changes(url, run):
    async with HubClient(url, "wrong") as stranger:
        with pytest.raises(Refused) as caught:
            await stranger.put_object("a", memoryview(BIG))
        assert caught.value.reason == "token"
        with pytest.raises(Refused, match="token"):
            await stranger.get_object("a", memoryview(bytearray(4)))
        with pytest.raises(Refused, match="token"):
            await stranger.connect()
        with pytest.raises(Refused, match="token"):
            await stranger.call("GET", "/status")
    async with aiohttp.ClientSession() as session, session.get(f"{url}/nowhere") as response:
        assert response.status == 401
        assert await response.json() == {"reason": "token", "detail": "the join token is missing or wrong"}
    assert run.objects == {} and run.links == {} and set(run.refusals) == {"token"}


async def test_a_client_of_another_run_is_refused(url, run):
    async with HubClient(url, TOKEN, "run-2") as foreigner:
        with pytest.raises(Refused) as caught:
            await foreigner.connect()
        assert caught.value.reason == "run"
        with pytest.raises(Refused, match="run-2"):
            await foreigner.put_object("a", memoryview(b"abc"))
    assert run.objects == {} and "run" in run.refusals


async def test_extra_routes_answer_behind_the_same_token(client):
    assert await client.call("GET", "/status") == {"learners": 3}
    with pytest.raises(Gone):
        await client.call("GET", "/nowhere")


async def test_an_occupied_port_is_one_line_for_the_user(url, run):
    port = int(url.rpartition(":")[2])
    with pytest.raises(UserError, match=f"127.0.0.1:{port} is taken"):
        await server.start(server.make_app(run, TOKEN), "127.0.0.1", port)


async def test_a_hub_that_is_not_there_is_one_line(unused_port="1"):
    async with HubClient(f"http://127.0.0.1:{unused_port}", TOKEN, backoff_s=()) as client:
        with pytest.raises(Unreachable, match=r"http://127\.0\.0\.1:1"):
            await client.connect()
        with pytest.raises(TransferFailed, match="put a chunk 0"):
            await client.put_object("a", memoryview(b"abc"))


# ---- control -----------------------------------------------------------------------------------------------


async def test_messages_pass_both_ways_in_order(client, run, app):
    link = await client.connect()
    assert await run.events.get() == ("connected", 1)
    for step in (1, 2):
        link.send(messages.Boundary(sequence=step, step=step))
        run.links[1].send(messages.Progress(tokens=step, sequence=step))
    assert [(await run.events.get())[1].sequence for _ in (1, 2)] == [1, 2]
    received = aiter(link)
    assert [(await anext(received)).tokens for _ in (1, 2)] == [1, 2]
    await link.close("leaving")
    assert await run.events.get() == ("disconnected", "leaving")
    assert client.traffic.bytes_control == app[server.HUB].by_learner["ada"].bytes_control > 0


async def test_what_was_sent_before_closing_arrives(client, run):
    link = await client.connect()
    await run.events.get()
    link.send(messages.Leave(reason="done"))
    await link.close()
    assert await run.events.get() == (1, messages.Leave(reason="done"))
    link.send(messages.Heartbeat())  # after the end: nothing, and no error


async def test_the_hub_says_why_it_hangs_up(client, run):
    link = await client.connect()
    await run.events.get()
    run.links[1].send(messages.Refused(reason="fingerprint", detail="other model"))
    run.links[1].end("refused")
    assert [message.reason async for message in link] == ["fingerprint"]
    assert link.reason == "refused"
    await link.close()


@pytest.mark.parametrize(
    "frame", [b"\xc1garbage", "text", bytes(2**20 + 1)], ids=["garbage", "text", "large"]
)
async def test_a_malformed_frame_costs_only_its_own_connection(client, run, url, frame):
    link = await client.connect()
    await run.events.get()
    async with aiohttp.ClientSession(headers=AUTH) as session, session.ws_connect(f"{url}/ws") as socket:
        await run.events.get()
        await (socket.send_str(frame) if isinstance(frame, str) else socket.send_bytes(frame))
        assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
    kind, reason = await run.events.get()
    assert kind == "disconnected" and reason.startswith("control frame: ")
    assert run.refusals == ["frame"]
    link.send(messages.Heartbeat())
    assert await run.events.get() == (1, messages.Heartbeat())
    await link.close()


async def test_a_party_that_does_not_read_loses_its_connection_and_blocks_nobody(client, run):
    link = await client.connect()
    await run.events.get()
    for _ in range(20):
        run.links[1].send(messages.Stop(reason="x" * 500_000))
    kind, reason = await run.events.get()
    assert kind == "disconnected" and "outbox full" in reason
    assert [message async for message in link] == []
    await link.close()


async def test_a_defect_behind_the_transport_costs_one_connection(client, run, caplog):
    link = await client.connect()
    await run.events.get()
    link.send(messages.Leave(reason="defect"))
    assert [message async for message in link] == []
    kind, reason = await run.events.get()
    assert kind == "disconnected" and reason.startswith("internal")
    assert "a defect" in caplog.text
    await link.close()
    await client.put_object("a", memoryview(b"still serving"))


async def test_bulk_that_does_not_move_leaves_control_alone(client, run, url):
    link = await client.connect()
    await run.events.get()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(f"PUT /objects/a/0 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n".encode())
    writer.write(b"Content-Length: 100\r\n\r\n" + framed(bytes(64))[:50])
    await writer.drain()
    link.send(messages.Heartbeat())
    assert await run.events.get() == (1, messages.Heartbeat())
    await client.put_object("a", memoryview(bytes(64)))  # a newer request takes the chunk over
    writer.write(framed(bytes(64))[50:])
    assert b"409" in await reader.readline()
    writer.close()
    await writer.wait_closed()
    assert run.complete_names == ["a"]
    await link.close()


async def test_a_hub_that_closes_ends_its_links_with_a_reason(app, run):
    runner, port = await server.start(app, "127.0.0.1")
    async with HubClient(f"http://127.0.0.1:{port}", TOKEN) as client:
        link = await client.connect()
        await run.events.get()
        await runner.cleanup()
        assert [message async for message in link] == []
        assert link.reason == "the hub closes"
        await link.close()
