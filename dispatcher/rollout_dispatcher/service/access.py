"""Who may connect: the token, the certificates, and which addresses need them.

A dispatcher that can be reached from other machines starts only if it can tell who connects, by a
token or by client certificates, unless it is told to trust its network (`--insecure`).

Who has the token may do whatever clients may; what keeps one producer from speaking for another is
the key that each makes for itself.
"""

import hashlib
import hmac
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rollout_dispatcher.errors import ConfigError, Unauthorized
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.security import is_loopback, read_token, server_tls


@dataclass(frozen=True, slots=True, repr=False)
class Access:
    """What a client must show. tls: None for plain TCP; Unix sockets are always plain."""

    token: str | None = None
    tls: ssl.SSLContext | None = None
    certificate: bool = False

    def check_token(self, shown: str | None) -> None:
        """Raise Unauthorized unless this is the token, or none is asked for.

        Takes as long for a token that is nearly right as for one that is all wrong.
        """
        if self.token is None:
            return
        if shown is None:
            raise Unauthorized(
                "this dispatcher asks for a token and got none; give the client the file of its "
                "--token-file (DISPATCHER_TOKEN_FILE)"
            )
        # Bytes that are not UTF-8 come from a header as surrogates.
        said = shown.encode(errors="surrogatepass")
        if not hmac.compare_digest(said, self.token.encode()):
            raise Unauthorized(
                "the token is not this dispatcher's; give the client the file of its --token-file "
                "(DISPATCHER_TOKEN_FILE)"
            )

    def check_certificate(self, shown: object) -> None:
        """Raise Unauthorized if a certificate is asked for; one that is `shown` was verified."""
        if self.certificate and not shown:
            raise Unauthorized(
                "this dispatcher asks for a client certificate of its --tls-client-ca and got "
                "none; give the client one (DISPATCHER_TLS_CLIENT_CERT, DISPATCHER_TLS_CLIENT_KEY)"
            )

    def tls_for(self, endpoint: Endpoint) -> ssl.SSLContext | None:
        """How to serve on this address."""
        return None if endpoint.path else self.tls


#: No token, no TLS.
EVERYBODY = Access()


def digest_of(key: str | None) -> str:
    """What is remembered of a client's key: nobody who reads it can show the key."""
    if key is None:
        return ""
    return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def exposed(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """Those that other machines may reach. Raises ConfigError for a name that has no address."""
    return [item for item in endpoints if not item.path and not is_loopback(item.host)]


def open_access(
    endpoints: Iterable[Endpoint],
    *,
    token_file: Path | None,
    certificate: Path | None,
    key: Path | None,
    client_ca: Path | None,
    insecure: bool,
) -> Access:
    """Read the files. Raises ConfigError for what is wrong with them, or missing off loopback."""
    endpoints = list(endpoints)
    if (certificate is None) != (key is None):
        raise ConfigError("--tls-cert and --tls-key go together; give both or neither")
    if client_ca is not None and certificate is None:
        raise ConfigError("--tls-client-ca needs TLS: give --tls-cert and --tls-key too")
    tls = None
    if certificate is not None and key is not None:
        tls = server_tls(certificate, key, client_ca)
    elif named := [item for item in endpoints if item.tls]:
        raise ConfigError(f"{named[0]} cannot be served without --tls-cert and --tls-key")
    token = None if token_file is None else read_token(token_file)
    if token is None and client_ca is None and not insecure:
        _refuse_exposed(endpoints)
    return Access(token, tls, client_ca is not None)


def _refuse_exposed(endpoints: Iterable[Endpoint]) -> None:
    for endpoint in exposed(endpoints):
        raise ConfigError(
            f"{endpoint} can be reached from other machines, and anybody there could push samples "
            "or take steps; give --token-file (or --tls-client-ca with --tls-cert and --tls-key), "
            "listen on 127.0.0.1 or a unix: socket, or accept that with --insecure"
        )
