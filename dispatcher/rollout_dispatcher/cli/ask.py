"""An HTTP client for the commands that ask a running dispatcher; and `dispatcher wait-ready`.

The address is found as `serve` finds where to listen: a flag, the environment, the config file, the
default; or it is in a ready file, which is read again for each connection. `wait-ready` asks
`/readyz` until the dispatcher is ready or the time is up. It accepts a dispatcher only, and with
`--run-id` or a ready file that run only.
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

#: Between two probes of `wait-ready`.
POLL_SECONDS = 0.1
#: For one answer, from the connection to the last byte.
ANSWER_SECONDS = 5.0
#: More than the status of thousands of ranks needs.
MAX_BODY = 64 * 2**20
#: A server on all addresses is reached at this one.
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
    """No dispatcher became ready in time, or another server answered."""

    code = "not-ready"


def seconds_of(flag: str, text: str) -> float:
    """Read the duration given after a flag. Raises ConfigError."""
    try:
        return float(str(DURATION.parse(text)))
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: {error}") from None


# -- flags ------------------------------------------------------------------------------------


def add_address(parser: Parser, *, ready_file: str) -> None:
    """Add the flags of the address; ready_file: the help of `--ready-file`."""
    parser.add_argument("--config", metavar="FILE", help="the TOML file that serve reads")
    parser.add_argument(
        "--http",
        metavar="ADDRESS",
        help="its HTTP plane [$DISPATCHER_HTTP, http in the --config file, else "
        f"{HTTP_PLANE}; with --ready-file, what that says]",
    )
    parser.add_argument("--ready-file", type=Path, metavar="FILE", help=ready_file)


def add_trust(parser: Parser, *, insecure: str) -> None:
    """Add the flags of trusted certificates; insecure: the help of `--insecure`."""
    parser.add_argument(
        "--tls-ca",
        type=Path,
        default=os.environ.get("DISPATCHER_TLS_CA") or None,
        metavar="FILE",
        help="authorities to trust for a tls:// address [$DISPATCHER_TLS_CA, else the system's]",
    )
    parser.add_argument("--insecure", action="store_true", help=insecure)


def add_credentials(parser: Parser) -> None:
    """Add the flags of token, client certificate and trusted certificates."""
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


def reachable(at: Endpoint) -> Endpoint:
    """The address at which a client reaches a listener. Raises ConfigError for port 0."""
    if not at.path and at.port == 0:
        raise ConfigError(
            f"{at} takes any free port, which only the dispatcher knows; give its --ready-file"
        )
    return replace(at, host=_LOOPBACK.get(at.host, at.host))


# -- the client -------------------------------------------------------------------------------


class Client:
    """An HTTP client of one dispatcher, over one connection as long as that lasts.

    timeout: seconds for one answer. address: of the dispatcher, or the ready file that names it.
    run_id: the run that the ready file names; None: any.
    """

    def __init__(self, args: Namespace, environ: Mapping[str, str]) -> None:
        """Read the flags of `add_address`, `add_trust` and, if present, `add_credentials`.

        Raises ConfigError.
        """
        path = args.config or environ.get(f"{ENV_PREFIX}CONFIG")
        settings: dict[str, Any] = dict(read_toml(Path(path)).values) if path else {}
        for name in "http", "tls_cert", "token_file":
            settings[name] = environ.get(ENV_PREFIX + name.upper(), settings.get(name))
        self._headers = {}
        if hasattr(args, "token_file"):
            file = args.token_file or settings["token_file"]
            if file not in (None, "", NONE):
                self._headers["Authorization"] = f"Bearer {read_token(Path(str(file)))}"
        self._args = args
        self._http = self._address(settings)
        if self._http is not None and self._http.tls:
            self._tls()  # reports unusable files now
        self._connection: http.client.HTTPConnection | None = None
        self.timeout = ANSWER_SECONDS
        self.address = str(self._http or args.ready_file)
        self.run_id: str | None = None

    def _address(self, settings: Mapping[str, Any]) -> Endpoint | None:
        """The address, with the precedence of `serve`; None if it is in the ready file."""
        if self._args.http is not None:
            return reachable(Endpoint.parse(self._args.http))
        if self._args.ready_file is not None:
            return None
        written = settings["http"]
        at = HTTP_PLANE if written is None else Endpoint.parse(str(written))
        # `serve` uses TLS on all its TCP addresses once it has a certificate.
        secured = settings["tls_cert"] not in (None, NONE) and not at.path
        return reachable(replace(at, tls=at.tls or secured))

    def _tls(self) -> ssl.SSLContext:
        shown = getattr(self._args, "tls_cert", None), getattr(self._args, "tls_key", None)
        context = client_tls(self._args.tls_ca, *shown)
        if self._args.insecure:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context

    def get(self, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        """Send one request; returns the response and its body, at most MAX_BODY bytes.

        Raises OSError or HTTPException.
        """
        connection = self._connection
        if connection is None or connection.sock is None:
            connection = self._connect()
        # A timeout of the socket is for one read; a server may send a byte at a time.
        late = threading.Timer(self.timeout, _shut_down, [connection.sock])
        late.start()
        try:
            connection.request("GET", path, headers=self._headers | headers)
            response = connection.getresponse()
            return response, response.read(MAX_BODY)
        except (OSError, http.client.HTTPException):
            if not late.is_alive():
                raise TimeoutError("timed out") from None
            raise
        finally:
            late.cancel()

    def read(self, path: str = "/statusz", accept: str = "application/json") -> str:
        """The text of a 200 answer. Raises NoAnswer, with the reason in a few words."""
        try:
            response, body = self.get(path, Accept=accept)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise NoAnswer(reason(error)) from None
        text = body.decode(errors="replace")
        if response.status != 200:
            self.close()
            try:
                text = str(json.loads(text)["message"])
            except (ValueError, LookupError, TypeError):
                text = " ".join(text[:80].split())
            raise NoAnswer(f"HTTP {response.status} {text}")
        return text

    def _connect(self) -> http.client.HTTPConnection:
        try:
            at = self._refresh()
        except OSError as error:
            raise OSError(f"{self.address} cannot be read: {reason(error)}") from None
        except ValueError:
            raise OSError(f"{self.address} is not written yet") from None
        connection = http.client.HTTPConnection(at.host or "localhost", at.port or None)
        self._connection = connection  # the caller closes it after an error
        if at.path:
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(self.timeout)
            connection.sock.connect(at.path)
        else:
            connection.sock = socket.create_connection((at.host, at.port), self.timeout)
        if at.tls:
            connection.sock = self._tls().wrap_socket(connection.sock, server_hostname=at.host)
        return connection

    def _refresh(self) -> Endpoint:
        """Read address and run from the ready file, if there is one.

        Raises OSError or ValueError while the file is missing or partly written.
        """
        if self._args.ready_file is None:
            assert self._http is not None
            return self._http
        ready = json.loads(self._args.ready_file.read_text(encoding="utf-8"))
        try:
            at = self._http or reachable(Endpoint.parse(ready["http"]))
            self.run_id = str(ready["run_id"])
        except (ConfigError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"{self._args.ready_file} is no --ready-file of a dispatcher"
            ) from None
        self.address = str(at)
        return at

    def close(self) -> None:
        """Close the connection; the next request opens one again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _shut_down(sock: socket.socket) -> None:
    """End the reads of another thread; the socket may be closed already."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def reason(error: OSError | http.client.HTTPException) -> str:
    """Why there was no answer, in a few words."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


# -- wait-ready -------------------------------------------------------------------------------


def run(argv: Sequence[str]) -> int:
    """Wait. Raises NotReady when the time is up, or if another server answers."""
    args = _parser().parse_strictly(argv)
    timeout = seconds_of("--timeout", args.timeout)
    client = Client(args, os.environ)
    began = time.monotonic()
    deadline, why = began + timeout, "there was no time to ask"
    while why and (left := deadline - time.monotonic()) > 0:
        client.timeout = min(left, ANSWER_SECONDS)
        if why := _probe(client, args.run_id):
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


def _probe(client: Client, run_id: str | None) -> str:
    """Why the dispatcher is not ready, in a few words; empty if it is. Raises NotReady."""
    try:
        response, body = client.get("/readyz")
    except (OSError, http.client.HTTPException) as error:
        return reason(error)
    finally:
        client.close()
    run_id = run_id or client.run_id
    answers = response.headers.get(RUN_HEADER)
    if response.status != 200:  # a proxy answers too, before the dispatcher is there
        return f"HTTP {response.status} {body[:200].decode(errors='replace').strip()}"
    if answers is None:
        raise NotReady(
            f"{client.address} is no dispatcher: its /readyz answers 200 without {RUN_HEADER}, as "
            f"the server {response.headers.get('Server', 'without a name')}; give --http of the "
            "dispatcher"
        )
    if run_id not in (None, answers):
        return f"it is ready, but of run {answers} instead of {run_id}"
    return ""
