"""Tokens, certificates and addresses, for both ends of a connection.

Only this module reads their files. A fault of one is a ConfigError of one line with the file and
the remedy. A secret never appears in an error.
"""

import os
import socket
import ssl
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from rollout_dispatcher.errors import ConfigError

#: Bytes of a token: enough not to be guessed, and little enough for a header.
TOKEN_BYTES = range(16, 1025)


def read_token(path: Path) -> str:
    """The secret in a file, white space around it removed. Raises ConfigError.

    Its group may read the file, as that of a secret mounted into a pod may; others may not.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            content = file.read(TOKEN_BYTES.stop + 64)
    except OSError as error:
        raise ConfigError(f"token file {path} cannot be read: {error.strerror}") from None
    if mode & 0o037:
        raise ConfigError(
            f"token file {path} has mode {mode:04o}, so others than its owner and group "
            f"may read it, or others than its owner write it; chmod 600 {path}"
        )
    token = content.strip()
    if len(token) not in TOKEN_BYTES:
        raise ConfigError(
            f"token file {path} holds a token of {len(token)} bytes instead of {TOKEN_BYTES.start} "
            f"to {TOKEN_BYTES.stop - 1}; make one: openssl rand -hex 32"
        )
    if not all(0x21 <= byte <= 0x7E for byte in token):
        raise ConfigError(
            f"token file {path} holds more than visible ASCII characters; make one: "
            "openssl rand -hex 32"
        )
    return token.decode("ascii")


def server_tls(certificate: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    """TLS 1.2 or newer for a listener. Raises ConfigError.

    With `client_ca` a client's certificate is verified if it shows one. The listener requires one
    after the handshake, since before it no error can be sent.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_chain(context, certificate, key)
    if client_ca is not None:
        _load_authorities(context, client_ca)
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def client_tls(
    ca: Path | None, certificate: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """TLS 1.2 or newer for a client, which verifies the server's certificate and name.

    ca: authorities to trust instead of the system's. Raises ConfigError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca is None:
        context.load_default_certs()
    else:
        _load_authorities(context, ca)
    if certificate is not None:
        _load_chain(context, certificate, key or certificate)
    return context


def is_loopback(host: str) -> bool:
    """Return whether every address of a name or literal is this machine's. Raises ConfigError."""
    try:
        found = {str(item[4][0]) for item in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ConfigError(f"the name {host!r} has no address: {error.strerror}") from None
    return all(_is_loopback_address(text) for text in found)


def _is_loopback_address(text: str) -> bool:
    address = ip_address(text)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def _load_chain(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    for path in (certificate, key):
        _check_readable(path)
    try:
        # Without a password argument OpenSSL would prompt for one on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{key} is not the key of the certificate in {certificate}") from None
        raise ConfigError(
            f"{certificate} and {key} are no certificate and unencrypted key in PEM: {error}"
        ) from None


def _load_authorities(context: ssl.SSLContext, path: Path) -> None:
    _check_readable(path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{path} holds no certificates in PEM: {error}") from None


def _check_readable(path: Path) -> None:
    """Raise ConfigError with the file's name, which OpenSSL's errors lack."""
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
