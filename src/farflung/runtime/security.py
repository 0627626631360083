"""Who may talk to a hub: the join token, TLS contexts, and where it is safe to listen without them."""

import ipaddress
import os
import secrets
import ssl
from pathlib import Path

from farflung.errors import UserError
from farflung.runtime.transport import one_line

TOKEN_BYTES = 20  # 160 bits, as hexadecimal: safe in a shell and in a header, and never begins with "-"


def new_token() -> str:
    """A fresh join token.

    >>> len(new_token())
    40
    """
    return secrets.token_hex(TOKEN_BYTES)


def save_token(path: str | os.PathLike[str], token: str) -> None:
    """Write a token to a file that only its owner can read."""
    Path(path).unlink(missing_ok=True)  # an existing file would keep its mode
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")


def load_token(path: str | os.PathLike[str]) -> str:
    """Read a token; UserError when there is none, or none that fits in a header."""
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"join token {os.fspath(path)}: {one_line(error)}") from None
    return check_token(token, f"join token {os.fspath(path)}")


def check_token(token: str, where: str) -> str:
    """Return a token that fits in a header; else UserError, which never shows the token itself.

    >>> check_token("0b5c", "FARFLUNG_TOKEN")
    '0b5c'
    """
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(f"{where}: expected one word of printable ASCII, as `farflung serve` prints it")
    return token


def server_context(
    cert: str | os.PathLike[str], key: str | os.PathLike[str], client_ca: str | os.PathLike[str] | None = None
) -> ssl.SSLContext:
    """TLS for a hub; with `client_ca`, learners must show a certificate that it signed.

    Raises:
        UserError: a file is missing or is not what it should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_pair(context, cert, key)
    if client_ca is not None:
        _load_authority(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(
    ca: str | os.PathLike[str] | None = None,
    cert: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
) -> ssl.SSLContext:
    """TLS for a learner: trust `ca` (None: the system's authorities); show `cert` when given.

    Raises:
        UserError: a file is missing or is not what it should be.
    """
    if (cert is None) != (key is None):
        raise UserError("TLS: a client certificate and its key belong together; give both or neither")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca is None:
        context.load_default_certs()
    else:
        _load_authority(context, ca)
    if cert is not None and key is not None:
        _load_pair(context, cert, key)
    return context


def check_listen(host: str, tls: bool, insecure: bool) -> None:
    """UserError when a hub would be reachable from other machines without TLS, unless that is wanted.

    >>> check_listen("127.0.0.1", tls=False, insecure=False)
    """
    if tls or insecure or is_loopback(host):
        return
    raise UserError(
        f"listening on {host or 'every address'} without TLS lets anyone on the way read the join token: "
        "give a certificate and key, or set insecure = true"
    )


def is_loopback(host: str) -> bool:
    """Whether an address is on this machine for sure.

    >>> is_loopback("127.0.0.1"), is_loopback("example.org")
    (True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may mean any interface


def _load_pair(context: ssl.SSLContext, cert: str | os.PathLike[str], key: str | os.PathLike[str]) -> None:
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"TLS certificate {cert} with key {key}: {one_line(error)}") from None


def _load_authority(context: ssl.SSLContext, ca: str | os.PathLike[str]) -> None:
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"TLS authority {ca}: {one_line(error)}") from None
