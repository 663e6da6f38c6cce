"""A real Prometheus says when the dispatcher started, ranks joined, and its settings changed."""

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.deploy.test_dashboard import DASHBOARD
from tests.e2e.harness import running
from tests.e2e.test_prometheus import config_for, query
from tests.support.addresses import free_address, free_port
from tests.support.client import Trainer
from tests.support.server import ServeProcess, eventually

pytestmark = pytest.mark.e2e
MARKS = {mark["name"]: mark for mark in DASHBOARD["annotations"]["list"]}


def test_restarts_generations_and_changes_of_settings_are_marked(
    tmp_path: Path, tool: Callable[[str], str]
) -> None:
    http, port, config = free_address(), free_port(), tmp_path / "serve.toml"
    asked = config_for(http, tmp_path)

    def marked(name: str) -> list[tuple[str, float]]:
        """What is to be read at its marks by now, and the value of each."""
        mark = MARKS[name]
        text = mark["expr"].replace("$job", "dispatcher").replace("$instance", http)
        found = query(port, text.replace("$__rate_interval", "3s"))
        outcomes = [(each["metric"].get("outcome", ""), each["value"][1]) for each in found]
        return [(mark["titleFormat"].replace("{{outcome}}", of), float(n)) for of, n in outcomes]

    def begins_and_ends(name: str, text: str) -> None:
        eventually(lambda: [each for each, _ in marked(name)] == [text], f"{text}: marked", 30)
        eventually(lambda: marked(name) == [], f"{text}: no longer", 30)

    def serve() -> ServeProcess:
        return ServeProcess(
            tmp_path, warm=True, dp_size=2, global_batch_size=4, micro_batch_size=2,
            http=http, config=config, drain_timeout="1s",
        )  # fmt: skip

    def reload(text: str) -> None:
        config.write_text(text)
        server.send_signal(signal.SIGHUP)

    config.write_text("max_wait = '5s'\n")
    started = time.time()
    with ExitStack() as stack:
        server = stack.enter_context(serve())
        stack.enter_context(
            running(
                tool("prometheus"), f"--config.file={asked}",
                f"--storage.tsdb.path={tmp_path / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            )
        )  # fmt: skip
        eventually(lambda: marked("Restarts"), "Prometheus scrapes", 60)
        ((_, first),) = marked("Restarts")
        assert started - 1 < first / 1000 < started + 60
        assert marked("Generations") == marked("Settings") == []
        with Trainer(server.endpoint, 2):
            begins_and_ends("Generations", "a process group of ranks joined")
        reload("max_wait = '1s'\n")
        begins_and_ends("Settings", "settings changed")
        reload("max_wait = '1s'\n")  # as it is: no mark
        eventually(lambda: "nothing changes" in server.log(), "it was read")
        reload("max_open_steps = 2\n")  # needs a restart
        begins_and_ends("Settings", "settings refused")
        server.send_signal(signal.SIGTERM)
        server.wait()
        stack.enter_context(serve())
        eventually(lambda: [at > first for _, at in marked("Restarts")] == [True], "a second", 60)
