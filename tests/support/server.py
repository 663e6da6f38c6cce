"""A real `dispatcher serve` process for tests: free ports on loopback, ended whatever happens.

    with ServeProcess(tmp_path, dp_size=2, global_batch_size=8, micro_batch_tokens=64) as server:
        server.endpoint, server.http        # "127.0.0.1:40123", "127.0.0.1:40124"
        server.get("/readyz").status
        server.status()["balanced"]         # /statusz
        server.scrape()                     # /metrics, as {series: value}
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0

Leaving the block ends the process, and fails if it wrote a traceback to its log.
"""

import http.client
import json
import multiprocessing
import os
import resource
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from rollout_dispatcher.protocol.endpoint import Endpoint
from tests.support.options import FIXED, arguments

PATIENCE_S = 20.0
#: A command that is started imports all there is: two seconds alone, and as many times as long as
#: there are others for each core.
STARTED_WITHIN_S = 60.0
POLL_S = 0.01

Header = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Response:
    """What the HTTP plane answered."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def text(self) -> str:
        """The body."""
        return self.content.decode()

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.content)


def eventually(true: Callable[[], object], what: str, within: float = PATIENCE_S) -> None:
    """Return once `true()` is; fail when it is not in time."""
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {within:g} s"
        time.sleep(POLL_S)


class ServeProcess:
    """One running dispatcher. options: those of `dispatcher serve`, with underscores.

    A list gives an option several times; True and False are `--x` and `--no-x`. Settings
    that are no options are taken too.
    warm: fork a process that has everything imported, which is up in a tenth of the time, instead
    of starting the command. checked: run the command with Python's own checks, which cost time.
    module: what is started instead, if not warm; it takes the command's arguments.
    open_files: how many files it may open at the most; None for as many as this process.
    """

    def __init__(
        self,
        folder: Path,
        *,
        warm: bool = False,
        checked: bool = True,
        module: str = "rollout_dispatcher.cli.main",
        open_files: int | None = None,
        **options: object,
    ) -> None:
        self._ready = folder / "ready.json"
        self._log = folder / "serve.log"
        self._ready.unlink(missing_ok=True)
        fixed = {name: options.pop(name) for name in FIXED & options.keys()}
        options = {"listen": "127.0.0.1:0", "http": "127.0.0.1:0"} | options
        given = ["serve", *arguments(options), "--ready-file", str(self._ready)]
        if fixed:
            module, given = "tests.support.fixed", [json.dumps(fixed), *given]
        self.process: _Started | _Forked = (
            _Forked(module, given, self._log, open_files)
            if warm
            else _Started(module, given, self._log, checked, open_files)
        )
        self.endpoints: list[str] = []
        self.http = ""

    def __enter__(self) -> Self:
        try:
            eventually(self._is_up, "dispatcher serve is ready", STARTED_WITHIN_S)
        except BaseException:
            self._kill()
            raise
        addresses = json.loads(self._ready.read_text())
        self.endpoints, self.http = addresses["listen"], addresses["http"]
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._kill()
        if kind is None:
            assert "Traceback" not in self.log(), self.log()

    @property
    def endpoint(self) -> str:
        """The first address of the sample plane."""
        return self.endpoints[0]

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def log(self) -> str:
        """What the process has written, both streams."""
        return self._log.read_text(errors="replace")

    # -- HTTP -------------------------------------------------------------------------------

    def get(self, path: str, *headers: Header, tls: ssl.SSLContext | None = None) -> Response:
        """GET from the HTTP plane."""
        return self.request("GET", path, None, *headers, tls=tls)

    def post(self, path: str, body: bytes = b"", *headers: Header) -> Response:
        """POST to the HTTP plane."""
        return self.request("POST", path, body, *headers)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | Iterator[bytes] | None = None,
        *headers: Header,
        tls: ssl.SSLContext | None = None,
    ) -> Response:
        """One request on a connection of its own; headers: further ones, maybe of one name.

        tls: None for a plain connection.
        """
        at = Endpoint.parse(self.http)
        connection = (
            http.client.HTTPConnection(at.host, at.port, timeout=PATIENCE_S)
            if tls is None
            else http.client.HTTPSConnection(at.host, at.port, timeout=PATIENCE_S, context=tls)
        )
        try:
            if body is None or isinstance(body, bytes):
                connection.putrequest(method, path, skip_accept_encoding=True)
                length = [] if body is None else [("Content-Length", str(len(body)))]
                for name, text in [*headers, *length]:
                    connection.putheader(name, text)
                connection.endheaders(body)
            else:
                connection.request(method, path, body)
            answer = connection.getresponse()
            return Response(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()

    def status(self) -> dict[str, Any]:
        """What /statusz says."""
        found: dict[str, Any] = self.get("/statusz").json
        return found

    def scrape(self) -> dict[str, float]:
        """What /metrics says: `name` or `name{label=value,...}`, without the prefix -> value."""
        return series(self.get("/metrics").text)

    def await_status(self, **expected: object) -> None:
        """Wait until /statusz shows these values."""
        eventually(lambda: expected.items() <= self.status().items(), f"/statusz shows {expected}")

    def await_scrape(self, true: Callable[[dict[str, float]], object], what: str) -> None:
        """Wait until /metrics satisfies a condition."""
        eventually(lambda: true(self.scrape()), what)

    # -- the end ----------------------------------------------------------------------------

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the process."""
        self.process.send_signal(number)

    def wait(self, within: float = PATIENCE_S) -> int:
        """The exit code, once it has one."""
        eventually(lambda: self.process.poll() is not None, "dispatcher serve ends", within)
        code = self.process.poll()
        assert code is not None
        return code

    def _is_up(self) -> bool:
        code = self.process.poll()
        assert code is None, f"dispatcher serve ended with {code}: {self.log()}"
        return self._ready.exists()

    def _kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.wait()


@contextmanager
def serve(folder: Path, **options: Any) -> Iterator[str]:
    """A dispatcher with these options, for who wants no more of it than its endpoint."""
    folder.mkdir(exist_ok=True)
    with ServeProcess(folder, **options) as server:
        yield server.endpoint


class _Started:
    """The command, as a user starts it; `checked` switches Python's own checks on, or off."""

    def __init__(
        self, module: str, arguments: list[str], log: Path, checked: bool, open_files: int | None
    ) -> None:
        checks = ["-X", "dev"] if checked else []
        command = [sys.executable, *checks, "-m", module, *arguments]
        if open_files is not None:
            command = ["sh", "-c", 'ulimit -n "$0"; exec "$@"', str(open_files), *command]
        environment = dict(os.environ)
        if not checked:  # asyncio's would come from whoever runs the tests
            environment.pop("PYTHONASYNCIODEBUG", None)
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


class _Forked:
    """The same, forked from a process that waits with everything imported."""

    _context = multiprocessing.get_context("forkserver")
    _context.set_forkserver_preload(["__main__", "rollout_dispatcher.service.server", __name__])

    def __init__(
        self, module: str, arguments: list[str], log: Path, open_files: int | None
    ) -> None:
        self._process = self._context.Process(
            target=_main, args=(module, arguments, str(log), open_files)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)


def _main(module: str, arguments: list[str], log: str, open_files: int | None) -> None:
    if open_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
    with Path(log).open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.exit(import_module(module).main(arguments))


def series(text: str) -> dict[str, float]:
    """The samples of an exposition in Prometheus text format."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            name = sample.name.removeprefix("dispatcher_")
            found[f"{name}{{{labels}}}" if labels else name] = sample.value
    return found
