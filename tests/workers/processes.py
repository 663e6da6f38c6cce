"""Real processes for tests, each in a process group of its own that ends with its context."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

ROOT = Path(__file__).parents[2]


@contextmanager
def own_group(
    command: list[str], environment: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a command; whatever is left of it and its children is killed at the end."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def serve(directory: Path, **options: object) -> Iterator[str]:
    """A dispatcher process with these options; yields the endpoint of its sample plane."""
    directory.mkdir(exist_ok=True)
    ready = directory / "ready.json"
    facts = {
        "listen": f"unix:{directory}/sample.sock",
        "http": f"unix:{directory}/http.sock",
        "ready_file": ready,
    } | options
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in facts.items()]
    with own_group([sys.executable, "-m", "dispatcher.cli.main", "serve", *flags]) as process:
        deadline = monotonic() + 30
        while not ready.exists():
            assert process.poll() is None, "the dispatcher ended before it was ready"
            assert monotonic() < deadline, "the dispatcher was not ready in time"
            sleep(0.05)
        yield json.loads(ready.read_text())["listen"][0]
