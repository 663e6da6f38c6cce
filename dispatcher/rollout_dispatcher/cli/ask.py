"""How commands ask a dispatcher: which one, with which credentials; and `dispatcher wait-ready`.

Whom to ask is found as `serve` finds where to listen: a flag, the environment, the config file, the
default; or a ready file says it, which is read anew for each connection. `wait-ready` asks
`/readyz` until it says yes or the time is up, and is content with a dispatcher only, and, where it
is told which, with that run only.
"""

import http.client
import json
import os
import socket
import ssl
import threading
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollout_dispatcher.cli.options import NONE, Parser, read_toml
from rollout_dispatcher.cli.problems import ENV_PREFIX
from rollout_dispatcher.errors import ConfigError, DispatcherError
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.security import client_tls, read_token
from rollout_dispatcher.service.config.values import DURATION, HTTP_PLANE, RUN_HEADER

#: Often enough to be prompt, seldom enough not to be seen in a profile.
POLL_SECONDS = 0.1
#: How long one question may take.
PROBE_SECONDS = 5.0
#: More than the status of thousands of ranks needs.
MAX_BODY = 64 * 2**20
#: Listening there is listening on all addresses; this one is among them.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  nothing is bound here

EPILOG = """\
examples:
  dispatcher wait-ready && torchrun --nproc-per-node 8 train.py
  dispatcher wait-ready --ready-file ready.json   # of this very serve --ready-file ready.json
  dispatcher wait-ready --http unix:/run/dispatcher-http.sock --timeout 2s
  dispatcher wait-ready --http tls://dispatcher.example:9471 --tls-ca ca.pem

It shows no token and no certificate, as probes need none. In the environment of a dispatcher that
has DISPATCHER_TLS_CERT it speaks TLS.

exit codes: 0 ready, 1 not ready in time, or another server answered, 2 usage
"""


class NoAnswer(DispatcherError):
    """The dispatcher cannot be asked at present; it may be again."""

    code = "no-answer"


class NotReady(DispatcherError):
    """The dispatcher did not become ready in time."""

    code = "not-ready"


class NoDispatcher(DispatcherError):
    """What answers there is no dispatcher, and waiting will not make it one."""

    code = "no-dispatcher"


def seconds_of(flag: str, text: str) -> float:
    """A duration that was written after a flag. Raises ConfigError."""
    try:
        return float(str(DURATION.parse(text)))
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: {error}") from None


# -- flags ------------------------------------------------------------------------------------


def add_address(parser: Parser, *, ready_file: str) -> None:
    """The flags that `address_of` reads; ready_file: what that one is for, in words."""
    parser.add_argument("--config", metavar="FILE", help="the TOML file that serve reads")
    parser.add_argument(
        "--http",
        metavar="ADDRESS",
        help="its HTTP plane [$DISPATCHER_HTTP, http in the --config file, else "
        f"{HTTP_PLANE}; with --ready-file, what that says]",
    )
    parser.add_argument("--ready-file", type=Path, metavar="FILE", help=ready_file)


def add_trust(parser: Parser, *, insecure: str) -> None:
    """The flags that say which certificates are trusted; insecure: the help of that one."""
    parser.add_argument(
        "--tls-ca",
        type=Path,
        default=os.environ.get("DISPATCHER_TLS_CA") or None,
        metavar="FILE",
        help="authorities to trust for a tls:// address [$DISPATCHER_TLS_CA, else the system's]",
    )
    parser.add_argument("--insecure", action="store_true", help=insecure)


def add_credentials(parser: Parser) -> None:
    """The flags that `Client.of` reads, but for the address."""
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="the secret to show [$DISPATCHER_TOKEN_FILE, token_file in the --config file]",
    )
    add_trust(parser, insecure="do not verify the dispatcher's certificate")
    parser.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="certificate to show, with --tls-client-ca"
    )
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key")


def address_of(args: Namespace, environ: Mapping[str, str]) -> Endpoint | None:
    """Where to ask, with the precedence of `serve`; None where the ready file says so."""
    if args.http is not None:
        return reachable(Endpoint.parse(args.http))
    if args.ready_file is not None:
        return None
    said = _config_file(args, environ)
    for name in "http", "tls_cert":
        said[name] = environ.get(ENV_PREFIX + name.upper(), said.get(name))
    at = HTTP_PLANE if said["http"] is None else Endpoint.parse(str(said["http"]))
    # `serve` speaks TLS on all its TCP addresses once it has a certificate.
    secured = said["tls_cert"] not in (None, NONE) and not at.path
    return reachable(replace(at, tls=at.tls or secured))


def reachable(at: Endpoint) -> Endpoint:
    """Where a client finds what listens there. Raises ConfigError for a port that is not known."""
    if not at.path and at.port == 0:
        raise ConfigError(
            f"{at} takes any free port, which only the dispatcher knows; give its --ready-file"
        )
    return replace(at, host=_LOOPBACK.get(at.host, at.host))


def tls_of(args: Namespace) -> ssl.SSLContext:
    """For an address that needs it; without the flags of a certificate, none is shown."""
    shown = getattr(args, "tls_cert", None), getattr(args, "tls_key", None)
    context = client_tls(args.tls_ca, *shown)
    if args.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _config_file(args: Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    path = args.config or environ.get(f"{ENV_PREFIX}CONFIG")
    return read_toml(Path(path)).values if path else {}


# -- connections ------------------------------------------------------------------------------


class HttpConnection(http.client.HTTPConnection):
    """An HTTP connection that can also go over a Unix socket or TLS."""

    def __init__(self, endpoint: Endpoint, timeout: float, tls: ssl.SSLContext | None) -> None:
        super().__init__(endpoint.host or "localhost", endpoint.port or None, timeout=timeout)
        self._path, self._tls = endpoint.path, tls
        self._connected: socket.socket | None = None

    def connect(self) -> None:
        if self._path:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(self._path)
        else:
            super().connect()
            if self._tls is not None:
                self.sock = self._tls.wrap_socket(self.sock, server_hostname=self.host)
        self._connected = self.sock

    def cut(self) -> None:
        """Have who reads, in another thread, find the end; also behind the last answer's head."""
        if self._connected is not None:
            with suppress(OSError):
                self._connected.shutdown(socket.SHUT_RDWR)


class Client:
    """Asks one dispatcher over one connection as long as that holds.

    timeout: seconds that one answer may take. address: whom it asks, for messages.
    """

    def __init__(self, args: Namespace, environ: Mapping[str, str], *, timeout: float) -> None:
        """By the flags of `add_address`, `add_trust` and, where it shows any, `add_credentials`.

        Raises ConfigError.
        """
        self._headers = {}
        if hasattr(args, "token_file"):
            config = _config_file(args, environ).get("token_file")
            path = args.token_file or environ.get(f"{ENV_PREFIX}TOKEN_FILE", config)
            if path not in (None, "", NONE):
                self._headers["Authorization"] = f"Bearer {read_token(Path(str(path)))}"
        self._args, self._timeout = args, timeout
        self._http = address_of(args, environ)
        if self._http is not None and self._http.tls:
            tls_of(args)  # what is wrong with its files is told at once
        self._connection: HttpConnection | None = None
        self.address = str(self._http or args.ready_file)

    def look(self) -> tuple[Endpoint, str | None]:
        """Address and run (None: any), by the ready file as it is now, which may be written yet.

        Raises OSError or ValueError while the file is not there.
        """
        if self._args.ready_file is None:
            assert self._http is not None
            return self._http, None
        said = json.loads(self._args.ready_file.read_text(encoding="utf-8"))
        try:
            return self._http or reachable(Endpoint.parse(said["http"])), str(said["run_id"])
        except (ConfigError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"{self._args.ready_file} is no --ready-file of a dispatcher"
            ) from None

    def connection(self, at: Endpoint, timeout: float) -> HttpConnection:
        """A connection of its own, which is not made yet."""
        return HttpConnection(at, timeout, tls_of(self._args) if at.tls else None)

    def get(self, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        """The answer and its body, at most MAX_BODY bytes. Raises OSError or HTTPException."""
        if self._connection is None:
            try:
                at, _ = self.look()
            except OSError as error:
                raise OSError(f"{self.address} cannot be read: {reason(error)}") from None
            except ValueError:
                raise OSError(f"{self.address} is not written yet") from None
            self.address = str(at)
            self._connection = self.connection(at, self._timeout)
        self._connection.request("GET", path, headers=self._headers | headers)
        response = self._connection.getresponse()
        return response, response.read(MAX_BODY)

    def close(self) -> None:
        """Close the connection; the next question opens one again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def reason(error: OSError | http.client.HTTPException) -> str:
    """Why there was no answer, in a few words."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


# -- wait-ready -------------------------------------------------------------------------------


def run(argv: Sequence[str]) -> int:
    """Wait; raises NotReady when the time is up, NoDispatcher when somebody else answers."""
    args = _parser().parse_strictly(argv)
    timeout = seconds_of("--timeout", args.timeout)
    client = Client(args, os.environ, timeout=PROBE_SECONDS)
    began = time.monotonic()
    deadline, why = began + timeout, "there was no time to ask"
    while why and (left := deadline - time.monotonic()) > 0:
        if why := _probe(client, args.run_id, left):
            time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
    if args.json:
        waited = round(time.monotonic() - began, 3)
        found = {"ready": not why, "address": client.address, "waited_s": waited, "why_not": why}
        print(json.dumps(found))
    if not why:
        return 0
    raise NotReady(
        f"{client.address} was not ready within {timeout:g} s ({why}); "
        "is this the --http address of the dispatcher?"
    )


def _parser() -> Parser:
    parser = Parser(
        prog="dispatcher wait-ready",
        description="Wait until a dispatcher is ready to take samples and ranks.",
        epilog=EPILOG,
    )
    only = "wait for the dispatcher that writes this file (serve --ready-file), and no other"
    add_address(parser, ready_file=only)
    parser.add_argument(
        "--run-id",
        metavar="ID",
        help="wait for this run and no other; /statusz and the log show it",
    )
    add_trust(
        parser,
        insecure="do not verify the certificate, as probes from inside a container do not",
    )
    parser.add_argument("--timeout", default="60s", help="give up after this long [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    return parser


def _probe(client: Client, run_id: str | None, timeout: float) -> str:
    """Nothing if it is ready, else in a few words why not. Raises NoDispatcher."""
    timeout = min(timeout, PROBE_SECONDS)
    try:
        at, written = client.look()
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    run_id = run_id or written
    connection = client.connection(at, timeout)
    late = threading.Timer(timeout, connection.cut)  # whatever comes byte by byte is in time
    late.start()
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        body = response.read(200).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        late.cancel()
        connection.close()
    answers = response.headers.get(RUN_HEADER)
    if response.status != 200:  # a proxy answers too, before the dispatcher is there
        return f"HTTP {response.status} {body}"
    if answers is None:
        raise NoDispatcher(
            f"{at} is no dispatcher: its /readyz answers 200 without {RUN_HEADER}, as the server "
            f"{response.headers.get('Server', 'without a name')}; give --http of the dispatcher"
        )
    if run_id not in (None, answers):
        return f"it is ready, but of run {answers} instead of {run_id}"
    return ""
