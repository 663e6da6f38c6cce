"""Authorization: tokens, certificates, and the addresses that need them.

A dispatcher that other machines can reach starts only with a token or client certificates, or with
`--insecure`.

The token opens everything, the producers' token opens pushes. A producer cannot act for another
one, as each makes a key of its own.

Files are read at start and at each SIGHUP (`renew`). Invariant: present connections stay; a
replaced token is valid for another `OVERLAP_SECONDS`.
"""

import hashlib
import hmac
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from rollout_dispatcher.errors import ConfigError, Unauthorized
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.security import is_loopback, read_token, server_tls

if TYPE_CHECKING:
    from rollout_dispatcher.service.config.serve import ServeConfig

#: Seconds for which a replaced token is valid: a mounted secret takes two minutes to reach all pods
#: of a cluster, and files that are copied by hand more. After a restart it is not.
OVERLAP_SECONDS = 600.0


class Rights(Enum):
    """Rights of a token."""

    ALL = "all"
    PUSH = "push"


@dataclass(slots=True, repr=False, eq=False)
class Access:
    """Credentials that clients need. tls: None for plain TCP; Unix sockets are always plain.

    certificate: whether one is required. producer_token: requires `token` too.
    """

    token: str | None = None
    tls: ssl.SSLContext | None = None
    certificate: bool = False
    producer_token: str | None = None
    #: Replaced tokens, with their rights and the time of their end.
    _former: list[tuple[str, Rights, float]] = field(default_factory=list)

    def renew(self, read: "Access", now: float) -> list[str]:
        """Use the tokens and certificates of `read`; returns what has changed, in words."""
        changed = []
        pairs = (
            ("--token-file", self.token, read.token, Rights.ALL),
            ("--producer-token-file", self.producer_token, read.producer_token, Rights.PUSH),
        )
        for option, old, new, rights in pairs:
            if old is not None and old != new:
                self._former.append((old, rights, now + OVERLAP_SECONDS))
                still = f"the former is valid for {OVERLAP_SECONDS / 60:g} min"
                changed.append(f"another token of {option}; {still}")
        self.token, self.producer_token = read.token, read.producer_token
        if read.tls is not None:
            self.tls = read.tls
            changed.append("certificates are as their files say, from the next connection on")
        return changed

    def rights(self, shown: str | None, now: float) -> Rights:
        """Return the rights of this token. Raises Unauthorized if it is required and not valid.

        The time it takes does not depend on how much of the token is right.
        """
        if self.token is None:
            return Rights.ALL
        if shown is None:
            raise Unauthorized(
                "this dispatcher asks for a token and got none; give the client the file of its "
                "--token-file (DISPATCHER_TOKEN_FILE)"
            )
        # A header has bytes that are not UTF-8 as surrogates.
        given = shown.encode(errors="surrogatepass")
        self._former = [former for former in self._former if now < former[2]]
        known = [(token, rights) for token, rights, _ in self._former]
        known += [(self.producer_token or "", Rights.PUSH), (self.token, Rights.ALL)]
        found = [
            rights
            for token, rights in known
            if hmac.compare_digest(given, token.encode()) and token
        ]
        if not found:
            raise Unauthorized(
                "the token is not this dispatcher's; give the client the file of its --token-file "
                "(DISPATCHER_TOKEN_FILE)"
            )
        return found[-1]  # the present tokens come last

    def check_certificate(self, shown: object) -> None:
        """Raise Unauthorized if a certificate is required; one that is `shown` was verified."""
        if self.certificate and not shown:
            raise Unauthorized(
                "this dispatcher asks for a client certificate of its --tls-client-ca and got "
                "none; give the client one (DISPATCHER_TLS_CLIENT_CERT, DISPATCHER_TLS_CLIENT_KEY)"
            )

    def tls_for(self, endpoint: Endpoint) -> ssl.SSLContext | None:
        """Return the TLS context for this address; None for plain TCP."""
        return None if endpoint.path else self.tls


def digest_of(key: str | None) -> str:
    """Return a digest of a client's key, which does not reveal it; empty without a key."""
    if key is None:
        return ""
    return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def exposed(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """Return those that other machines can reach. Raises ConfigError for an unknown name."""
    return [item for item in endpoints if not item.path and not is_loopback(item.host)]


def open_access(config: "ServeConfig") -> Access:
    """Read the files. Raises ConfigError if one is wrong, or missing off loopback."""
    endpoints, producer_token_file = [*config.listen, config.http], config.producer_token_file
    certificate, key, client_ca = config.tls_cert, config.tls_key, config.tls_client_ca
    if (certificate is None) != (key is None):
        raise ConfigError("--tls-cert and --tls-key go together; give both or neither")
    if client_ca is not None and certificate is None:
        raise ConfigError("--tls-client-ca needs TLS: give --tls-cert and --tls-key too")
    tls = None
    if certificate is not None and key is not None:
        tls = server_tls(certificate, key, client_ca)
    elif named := [item for item in endpoints if item.tls]:
        raise ConfigError(f"{named[0]} cannot be served without --tls-cert and --tls-key")
    token, producers = (
        None if path is None else read_token(path)
        for path in (config.token_file, producer_token_file)
    )
    if producers is not None and token is None:
        raise ConfigError(
            "--producer-token-file needs --token-file, with another token: trainers and operators "
            "show that one"
        )
    if producers is not None and producers == token:
        raise ConfigError(
            f"{producer_token_file} and {config.token_file} hold the same token, which would open "
            "everything to producers; make another one: openssl rand -hex 32"
        )
    if token is None and client_ca is None and not config.insecure:
        _refuse_exposed(endpoints)
    return Access(token, tls, client_ca is not None, producers)


def _refuse_exposed(endpoints: Iterable[Endpoint]) -> None:
    for endpoint in exposed(endpoints):
        raise ConfigError(
            f"{endpoint} can be reached from other machines, and anybody there could push samples "
            "or take steps; give --token-file (or --tls-client-ca with --tls-cert and --tls-key), "
            "listen on 127.0.0.1 or a unix: socket, or accept that with --insecure"
        )
