"""What a client shows to the dispatcher, and what it trusts.

One way to say it: `Credentials`, given to a client or, by default, read from the environment. Files
are read at every connection, so one that is replaced counts from the next connection on.
"""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rollout_dispatcher.errors import ConfigError, TlsFailed
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.security import client_tls, read_token

#: What OpenSSL calls it when the other side speaks something else than TLS.
NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "HTTP_REQUEST"})


@dataclass(frozen=True, slots=True)
class Credentials:
    """Files with which a client connects; each may be None.

    token_file: the secret of the dispatcher's `--token-file`; DISPATCHER_TOKEN_FILE.
    tls_ca: authorities to trust for `tls://` endpoints instead of the system's;
        DISPATCHER_TLS_CA.
    tls_client_cert, tls_client_key: the certificate to show where the dispatcher has a
        `--tls-client-ca`; DISPATCHER_TLS_CLIENT_CERT, DISPATCHER_TLS_CLIENT_KEY. Without a key it
        is looked for in the certificate's file.
    """

    token_file: Path | str | None = None
    tls_ca: Path | str | None = None
    tls_client_cert: Path | str | None = None
    tls_client_key: Path | str | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """What the DISPATCHER_ variables say; an empty one counts as unset."""
        found = os.environ if environ is None else environ
        names = ("token_file", "tls_ca", "tls_client_cert", "tls_client_key")
        return cls(**{name: found.get(f"DISPATCHER_{name.upper()}") or None for name in names})

    def token(self) -> str | None:
        """The secret. Raises ConfigError if its file cannot be used."""
        return None if self.token_file is None else read_token(Path(self.token_file))

    def tls_for(self, endpoint: Endpoint) -> ssl.SSLContext | None:
        """How to connect there; None for plain. Raises ConfigError if a file cannot be used."""
        if not endpoint.tls:
            return None
        ca, certificate, key = (
            None if path is None else Path(path)
            for path in (self.tls_ca, self.tls_client_cert, self.tls_client_key)
        )
        if key is not None and certificate is None:
            raise ConfigError(f"{key} is the key of no certificate; give tls_client_cert too")
        return client_tls(ca, certificate, key)

    def doubted(self, lost: ConnectionError, endpoint: Endpoint) -> ConnectionError:
        """A connection lost before its welcome, with what that may mean.

        A dispatcher that does not trust a client's certificate cannot always say so: with TLS 1.3
        the client is done with the handshake before it is looked at.
        """
        if not endpoint.tls or self.tls_client_cert is None:
            return lost
        return ConnectionError(
            f"{lost}; it may not trust {self.tls_client_cert}: check its dates and the "
            "dispatcher's --tls-client-ca"
        )


def hopeless(error: OSError, endpoint: Endpoint) -> TlsFailed | None:
    """What to tell the user about a TLS failure that trying again will not cure, else None.

    A session that was cut or garbled on its way is not one of them.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsFailed(
            f"the certificate of the dispatcher at {endpoint} is not trusted: "
            f"{error.verify_message}; check the name in the endpoint, the certificate's dates, and "
            "DISPATCHER_TLS_CA"
        )
    reason = (error.reason or "") if isinstance(error, ssl.SSLError) else ""
    if reason in NOT_TLS:
        return TlsFailed(
            f"the dispatcher at {endpoint} does not speak TLS; write the address without tls://, "
            "or start it with --tls-cert and --tls-key"
        )
    if "ALERT" in reason and "BAD_RECORD_MAC" not in reason:
        return TlsFailed(
            f"the dispatcher at {endpoint} refuses this client's TLS: {reason.lower()}; check its "
            "certificate (DISPATCHER_TLS_CLIENT_CERT) and the dispatcher's --tls-client-ca"
        )
    return None
