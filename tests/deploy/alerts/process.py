"""A dispatcher that may be killed, started again and stopped, at the same addresses."""

import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.support.addresses import free_port
from tests.support.options import arguments


class Process:
    """`dispatcher serve` with these options, on loopback. module: what is started instead."""

    def __init__(
        self,
        folder: Path,
        options: dict[str, object],
        module: str = "rollout_dispatcher.cli.main",
    ) -> None:
        self.endpoint, self.http = (f"127.0.0.1:{free_port()}" for _ in range(2))
        places = {"listen": self.endpoint, "http": self.http}
        self._command = [sys.executable, "-m", module, "serve"]
        self._command += arguments(places | options)
        self._log = folder / "serve.log"
        self.start()

    def start(self) -> None:
        """Start it, as a supervisor does."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def stop_for(self, seconds: float) -> None:
        """Let its machine stand still."""
        self._process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self._process.send_signal(signal.SIGCONT)

    def metrics(self, within: float) -> str | None:
        """The exposition; None where there is none in time."""
        try:
            with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=within) as answer:
                text: str = answer.read().decode()
                return text
        except OSError:
            return None
