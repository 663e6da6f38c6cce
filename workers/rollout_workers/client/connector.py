"""Connect, introduce, serve, take leave; and connect again, until that is of no use.

One client's way through its connections, whatever its role. A client that leaves while something
that it said is not confirmed is allowed one more attempt after a loss; any other leaves at once.

What it shows to the dispatcher, and what it trusts, is said one way: `Credentials`, given to a
client or, by default, read from the environment. Files are read at every connection, so one that is
replaced counts from the next connection on.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rollout_dispatcher.errors import (
    ConfigError,
    DispatcherError,
    DispatcherUnreachable,
    ProtocolError,
    TlsFailed,
)
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.security import client_tls, read_token
from rollout_dispatcher.transport.sockets import connect
from rollout_workers.client.link import Link
from rollout_workers.client.role import (
    CLOSE_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    FIRST_DELAY_S,
    HANDSHAKE_TIMEOUT_S,
    LOG_INTERVAL_S,
    Backoff,
    Role,
)

log = logging.getLogger(__name__)


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

    def explain_tls_loss(self, lost: ConnectionError, endpoint: Endpoint) -> ConnectionError:
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


def permanent_error(error: OSError, endpoint: Endpoint) -> TlsFailed | None:
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


class Connector:
    """Keeps a role connected, in the thread of `loop` alone.

    welcomes: connections that were established.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        endpoint: Endpoint,
        role: Role,
        credentials: Credentials,
        reconnect_timeout: float,
    ) -> None:
        self._loop, self._endpoint, self._role = loop, endpoint, role
        self._credentials, self._backoff = credentials, Backoff(reconnect_timeout)
        self._leaving: asyncio.Future[None] = loop.create_future()
        self._goodbye = True
        self._attempt: asyncio.Timeout | None = None
        self._link: Link | None = None
        self._received_before = 0  # bytes, on earlier connections
        self._logged_at: float | None = None  # when the log last heard that there is no connection
        self._finished_at: float | None = None  # when a loss found nothing left to do
        self.welcomes = 0

    @property
    def bytes_received(self) -> int:
        """On all connections together; hold the role's guard."""
        link = self._link
        return self._received_before + (link.bytes_received if link is not None else 0)

    async def run(self) -> DispatcherError | None:
        """Serve until it has left, or has no use for a connection; returns what ended it else."""
        try:
            await self._serve_until_over()
        except DispatcherError as error:
            if self._finished_at is not None:  # only its last word was looked after
                log.debug("not heard again after the end: %s", error)
                return None
            return error
        except Exception as error:
            log.exception("a client of the dispatcher failed")
            return ProtocolError(f"the client failed: {error!r}")
        return None

    def leave(self, *, goodbye: bool = True) -> None:
        """Have `run` return; what was said before is heard, if it can be.

        goodbye: without it the dispatcher counts the connection as lost.
        """
        if self._leaving.done():
            return
        self._goodbye = goodbye
        self._leaving.set_result(None)
        attempt = self._attempt
        if attempt is not None and not attempt.expired():
            soon = self._loop.time() + (CLOSE_TIMEOUT_S if self._unconfirmed() else 0.0)
            attempt.reschedule(min(attempt.when() or soon, soon))

    def pump(self) -> None:
        """The core has something to say."""
        if self._link is not None:
            self._link.pump()

    def ping(self) -> None:
        """Hear from the dispatcher soon, if it is there."""
        if self._link is not None:
            self._link.ping()

    def copy_unsent(self) -> None:
        """From now on the buffers of payloads may change."""
        if self._link is not None:
            self._link.copy_unsent()

    async def _serve_until_over(self) -> None:
        while not self._over():
            last_attempt = self._leaving.done()
            try:
                await self._serve()
                return
            except OSError as lost:
                if (refused := permanent_error(lost, self._endpoint)) is not None:
                    raise refused from lost
                if self._over():
                    return
                if (last_attempt and not self._finished) or self._is_late():
                    log.log(
                        self._level,
                        "%s closed without a connection to the dispatcher at %s (%s): it may not "
                        "know of %s",
                        self._role.name,
                        self._endpoint,
                        lost,
                        self._unconfirmed(),
                    )
                    return
                await self._pause(lost)

    @property
    def _finished(self) -> bool:
        with self._role.guard:
            return self._role.core.finished

    @property
    def _level(self) -> int:
        """Where nothing is left to do it is usual that the dispatcher is gone."""
        return logging.DEBUG if self._finished else logging.WARNING

    def _is_late(self) -> bool:
        """Whether a client with nothing left to do has looked for the dispatcher for long enough.

        It may have stopped; or it lives, and lost the last word with the connection; or it is
        started again, and waits for the last commit of a rank that closes meanwhile.
        """
        if not self._finished:
            return False
        now = self._loop.time()
        self._finished_at = now if self._finished_at is None else self._finished_at
        return now - self._finished_at >= CLOSE_TIMEOUT_S

    async def _pause(self, lost: OSError) -> None:
        """Wait before the next attempt; raises DispatcherUnreachable when out of patience."""
        delay = self._backoff.failed(self._loop.time())
        if delay is None:
            raise DispatcherUnreachable(self._endpoint, self._backoff.timeout, lost) from lost
        self._say_lost(lost)
        if self._leaving.done():
            await asyncio.sleep(delay)
        else:
            await asyncio.wait((self._leaving,), timeout=delay)

    def _say_lost(self, lost: OSError) -> None:
        """Tell the log at once, and then now and then: a thousand ranks may be looking."""
        now = self._loop.time()
        if self._logged_at is not None and now - self._logged_at < LOG_INTERVAL_S:
            return
        self._logged_at = now
        log.log(
            self._level,
            "%s has no connection to the dispatcher at %s (%s) and tries again for %.0f s",
            self._role.name,
            self._endpoint,
            str(lost) or type(lost).__name__,
            self._backoff.left(now),
        )

    def _say_found(self) -> None:
        """Tell the log if it heard of a loss."""
        if self._logged_at is not None:
            self._logged_at = None
            log.log(self._level, "%s is connected to %s again", self._role.name, self._endpoint)

    async def _serve(self) -> None:
        """One connection, to its loss (OSError) or to our own goodbye."""
        role = self._role
        token, tls = self._credentials.token(), self._credentials.tls_for(self._endpoint)
        with role.guard:
            role.core.token = token
        self._link = link = Link(role, self._loop)
        self._backoff.begins(self._loop.time())
        try:
            await self._within(
                CONNECT_TIMEOUT_S, connect(self._endpoint, link, tls), "no connection came about"
            )
            await self._within(
                HANDSHAKE_TIMEOUT_S, self._welcome(link), "the dispatcher did not answer the HELLO"
            )
            self.welcomes += 1
            self._finished_at = None
            self._backoff.connected(self._loop.time(), link.heartbeat_interval_s)
            self._say_found()
            link.pump()
            await link.watch(self._leaving)
            await (link.acknowledge_bye() if self._goodbye else link.flush())
        finally:
            link.abort()
            with role.guard:
                self._received_before += link.bytes_received
                self._link = None
                role.core.lost()

    async def _welcome(self, link: Link) -> None:
        try:
            await link.welcomed
        except ConnectionError as lost:
            raise self._credentials.explain_tls_loss(lost, self._endpoint) from lost

    async def _within(self, seconds: float, work: Awaitable[None], failure: str) -> None:
        """Raises TimeoutError that says `failure`, sooner than that once this client leaves.

        No attempt outlasts the client's patience, but for a moment that its last one has.
        """
        seconds = min(seconds, max(self._backoff.left(self._loop.time()), FIRST_DELAY_S))
        if self._leaving.done():
            seconds = min(seconds, CLOSE_TIMEOUT_S)
        attempt = self._attempt = asyncio.timeout(seconds)
        try:
            async with attempt:
                await work
        except TimeoutError as late:
            raise TimeoutError(failure) if attempt.expired() else late from None
        finally:
            self._attempt = None

    def _over(self) -> bool:
        """Whether no further connection is of use."""
        return self._leaving.done() and self._unconfirmed() is None

    def _unconfirmed(self) -> str | None:
        with self._role.guard:
            return self._role.core.unconfirmed
