"""`dispatcher wait-ready`: ask `/readyz` until it says yes or the time is up."""

import http.client
import os
import socket
import ssl
import time
from collections.abc import Sequence
from pathlib import Path

from rollout_dispatcher.cli.options import Parser
from rollout_dispatcher.errors import ConfigError, DispatcherError
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.security import client_tls
from rollout_dispatcher.service.config.units import DURATION

#: Often enough to be prompt, seldom enough not to be seen in a profile.
POLL_SECONDS = 0.1

EPILOG = """\
examples:
  dispatcher wait-ready && torchrun --nproc-per-node 8 train.py
  dispatcher wait-ready --http unix:/run/dispatcher-http.sock --timeout 2s
  dispatcher wait-ready --http tls://dispatcher.example:9471 --tls-ca ca.pem

It shows no token and no certificate, as probes need none.

exit codes: 0 ready, 1 not ready in time, 2 usage
"""


class NotReady(DispatcherError):
    """The dispatcher did not become ready in time."""

    code = "not-ready"


def run(argv: Sequence[str]) -> int:
    """Wait; raises NotReady when the time is up."""
    parser = Parser(
        prog="dispatcher wait-ready",
        description="Wait until a dispatcher is ready to take samples and ranks.",
        epilog=EPILOG,
    )
    parser.add_argument("--http", default="127.0.0.1:9471", help="its HTTP plane [%(default)s]")
    parser.add_argument(
        "--tls-ca",
        type=Path,
        default=os.environ.get("DISPATCHER_TLS_CA") or None,
        metavar="FILE",
        help="authorities to trust for a tls:// address [$DISPATCHER_TLS_CA, else the system's]",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="do not verify the certificate, as probes from inside a container do not",
    )
    parser.add_argument("--timeout", default="60s", help="give up after this long [%(default)s]")
    args = parser.parse_strictly(argv)
    try:
        timeout = DURATION.parse(args.timeout)
    except ValueError as error:
        raise ConfigError(f"--timeout {args.timeout}: {error}") from None
    assert isinstance(timeout, int | float)
    http_plane = Endpoint.parse(args.http)
    tls = client_tls(args.tls_ca) if http_plane.tls else None
    if tls is not None and args.insecure:
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    wait_ready(http_plane, float(timeout), tls)
    return 0


def wait_ready(http_plane: Endpoint, timeout: float, tls: ssl.SSLContext | None = None) -> None:
    """Return once `/readyz` answers 200; raises NotReady after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        answer = probe(http_plane, left, tls)
        if answer == "ready":
            return
        time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
    raise NotReady(
        f"{http_plane} was not ready within {timeout:g} s ({probe(http_plane, 1.0, tls)}); "
        "is this the --http address of the dispatcher?"
    )


def probe(http_plane: Endpoint, timeout: float, tls: ssl.SSLContext | None = None) -> str:
    """`ready`, or in a few words why not."""
    connection = _Connection(http_plane, min(timeout, 5.0), tls)
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        body = response.read(200).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return "ready" if response.status == 200 else f"HTTP {response.status} {body}"


class _Connection(http.client.HTTPConnection):
    """An HTTP connection that can also go over a Unix socket or TLS."""

    def __init__(self, endpoint: Endpoint, timeout: float, tls: ssl.SSLContext | None) -> None:
        super().__init__(endpoint.host or "localhost", endpoint.port or None, timeout=timeout)
        self._path, self._tls = endpoint.path, tls

    def connect(self) -> None:
        if not self._path:
            super().connect()
            if self._tls is not None:
                self.sock = self._tls.wrap_socket(self.sock, server_hostname=self.host)
            return
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
