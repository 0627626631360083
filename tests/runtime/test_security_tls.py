import stat

import pytest

from farflung.errors import UserError
from farflung.runtime import security, server
from farflung.runtime.client import HubClient
from farflung.runtime.transport import TransferFailed, Unreachable


class OneObject:
    def __init__(self):
        self.data = bytearray(5)

    def buffer_for(self, name, total_bytes):
        return memoryview(self.data)

    def complete(self, name):
        pass

    def source(self, name):
        return memoryview(self.data)

    async def connected(self, connection, link):
        pass

    async def message(self, connection, message):
        pass

    async def disconnected(self, connection, reason):
        pass

    def refused(self, reason, detail):
        pass


async def start(certificate, client_ca=None):
    backend = OneObject()
    context = security.server_context(*certificate, client_ca=client_ca)
    runner, port = await server.start(server.make_app(backend, "t"), "127.0.0.1", 0, context)
    return backend, runner, f"https://127.0.0.1:{port}"


async def test_bulk_and_control_pass_through_tls(certificate):
    backend, runner, url = await start(certificate)
    async with HubClient(url, "t", ssl=security.client_context(certificate[0])) as client:
        await client.put_object("a", memoryview(b"12345"))
        into = bytearray(5)
        await client.get_object("a", memoryview(into))
        link = await client.connect()
        await link.close()
    await runner.cleanup()
    assert into == backend.data == b"12345"


async def test_an_unknown_authority_is_not_trusted(certificate):
    _, runner, url = await start(certificate)
    async with HubClient(url, "t", backoff_s=()) as client:
        with pytest.raises(Unreachable, match="certificate verify failed"):
            await client.connect()
    await runner.cleanup()


async def test_mutual_tls_turns_away_who_shows_no_certificate(certificate):
    backend, runner, url = await start(certificate, client_ca=certificate[0])
    async with HubClient(
        url, "t", ssl=security.client_context(certificate[0], *certificate), backoff_s=()
    ) as friend:
        await friend.put_object("a", memoryview(b"12345"))
    async with HubClient(url, "t", ssl=security.client_context(certificate[0]), backoff_s=()) as stranger:
        with pytest.raises(TransferFailed):
            await stranger.put_object("a", memoryview(b"66666"))
        with pytest.raises(Unreachable):
            await stranger.connect()
    await runner.cleanup()
    assert backend.data == b"12345"


def test_a_wrong_file_is_one_line_for_the_user(tmp_path, certificate):
    with pytest.raises(UserError, match=r"TLS certificate .*nothing"):
        security.server_context(tmp_path / "nothing", certificate[1])
    with pytest.raises(UserError, match="TLS authority"):
        security.client_context(ca=certificate[1])
    with pytest.raises(UserError, match="belong together"):
        security.client_context(cert=certificate[0])


def test_a_token_survives_its_file_which_only_its_owner_reads(tmp_path):
    path = tmp_path / "token"
    path.write_text("old, for everybody")
    token = security.new_token()
    security.save_token(path, token)
    assert security.load_token(path) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_tokens_differ():
    assert security.new_token() != security.new_token()


@pytest.mark.parametrize("text", ["", "two words", "ä"])
def test_a_token_file_that_holds_no_token_is_a_user_error(tmp_path, text):
    (tmp_path / "token").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="join token"):
        security.load_token(tmp_path / "token")
    with pytest.raises(UserError, match="No such file"):
        security.load_token(tmp_path / "absent")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_tls(host):
    security.check_listen(host, tls=False, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "hub.example.org"])
def test_other_addresses_need_tls_or_an_explicit_word(host):
    with pytest.raises(UserError, match="insecure = true"):
        security.check_listen(host, tls=False, insecure=False)
    security.check_listen(host, tls=True, insecure=False)
    security.check_listen(host, tls=False, insecure=True)
