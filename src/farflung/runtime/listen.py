"""Where a gossip learner's partners may dial it, if anywhere: who cannot be dialled is reached through the hub."""

import re
import socket
from urllib.parse import urlsplit

import msgspec

from farflung.errors import UserError
from farflung.runtime.security import check_listen, is_loopback, server_context

OFF = "off"
BACKLOG = 128
EVERYWHERE = ("0.0.0.0", "::")


class Listen(msgspec.Struct, frozen=True, kw_only=True):
    """An address to listen on, and the one that partners dial (port 0: the one that is had)."""

    host: str
    port: int
    dial_host: str
    dial_port: int
    tls: bool  # with the learner's own certificate


def choose(
    listen: str | None, advertise: str | None, *, hub: str, cert: str | None, key: str | None, insecure: bool
) -> Listen | None:
    """What a learner's options mean, checked; None: it does not listen.

    Args:
        listen: HOST:PORT, port 0 takes a free one; "off"; None listens on loopback if the hub is there.
        advertise: HOST or HOST:PORT that partners dial, where that is not what is listened on.
        hub: its URL.
        cert, key: the learner's certificate; where it is asked to listen, partners are served TLS with it.
        insecure: listen beyond loopback without TLS.

    Raises:
        UserError: an address that is none, TLS files that are wrong, or no TLS beyond loopback.

    >>> choose(None, None, hub="http://127.0.0.1:7070", cert=None, key=None, insecure=False).host
    '127.0.0.1'
    >>> choose(None, None, hub="https://example.org:7070", cert=None, key=None, insecure=False) is None
    True
    """
    if listen is None:
        if advertise is not None:
            raise UserError(f"advertise = {advertise!r} has no effect without listen = 'HOST:PORT'")
        if not is_loopback(urlsplit(hub).hostname or ""):
            return None
        return Listen(host="127.0.0.1", port=0, dial_host="127.0.0.1", dial_port=0, tls=False)
    if listen == OFF:
        return None
    host, port = _parse(listen, "listen")
    tls = cert is not None and key is not None
    check_listen(host, tls, insecure)
    if cert is not None and key is not None:
        server_context(cert, key)
    if advertise is None and host in EVERYWHERE:
        raise UserError(f"listen = {listen!r} is every address: give advertise, the one that partners dial")
    dial_host, dial_port = (host, 0) if advertise is None else _parse(advertise, "advertise")
    return Listen(host=host, port=port, dial_host=dial_host, dial_port=dial_port, tls=tls)


def open_socket(listen: Listen) -> tuple[socket.socket, str]:
    """Listen; returns the socket and the URL that partners dial.

    Raises:
        OSError: the address cannot be had.
    """
    family, kind, *_, address = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    port = listen.dial_port or sock.getsockname()[1]
    host = f"[{listen.dial_host}]" if ":" in listen.dial_host else listen.dial_host
    return sock, f"{'https' if listen.tls else 'http'}://{host}:{port}"


def may_dial(address: str, hub: str) -> bool:
    """Whether the join token may go there: where the hub has TLS, not in the clear beyond this machine."""
    try:
        parts = urlsplit(address)
        return parts.scheme == "https" or hub.startswith("http:") or is_loopback(parts.hostname or "")
    except ValueError:
        return False


def _parse(text: str, name: str) -> tuple[str, int]:
    """HOST, HOST:PORT, [IPv6] or [IPv6]:PORT."""
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]/@\s]+)(?::(\d{1,5}))?", text)
    port = int(found[2] or 0) if found is not None else 0
    if found is None or port > 65535:
        raise UserError(f"{name} = {text!r}: write HOST:PORT, for example 127.0.0.1:0")
    return found[1].strip("[]"), port
