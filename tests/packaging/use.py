"""What a user does first, with what is installed; `smoke.py` runs it where nothing else is.

    python -I use.py FOLDER [--journal] [--dispatcher COMMAND]

Serves, pushes two steps' worth of samples, takes and commits both from the rank's side, reads the
metrics, and leaves files in FOLDER. With a journal the dispatcher is killed between the two steps.
With COMMAND the dispatcher is that of another environment, and this one has what clients need.
It must import nothing of the checkout, and no torch.
"""

import json
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import rollout_dispatcher
import rollout_workers
from rollout_workers import RankClient, RolloutProducer

COMMAND = str(Path(sysconfig.get_path("scripts"), "dispatcher"))
PATIENCE_S = 60.0
TOKENS, BATCH = 5, 4
#: Each sample's token ids, all different; as many as two steps take.
SAMPLES = np.arange(2 * BATCH * TOKENS).reshape(2 * BATCH, TOKENS)

T = TypeVar("T")


def awaited(look: Callable[[], T | None], what: str) -> T:
    """What `look` finds, once it finds something."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {PATIENCE_S:g} s")
        time.sleep(0.05)
    return found


class Served:
    """A `dispatcher serve` that is ready once its addresses are known."""

    def __init__(self, process: subprocess.Popen[bytes], ready: Path, command: str) -> None:
        self.process = process
        found = awaited(lambda: self._addresses(ready), "dispatcher serve")
        self.endpoint, self.http = str(found["listen"][0]), str(found["http"])
        wait = [command, "wait-ready", "--http", self.http, "--timeout", f"{PATIENCE_S:g}s"]
        subprocess.run(wait, check=True)

    def _addresses(self, ready: Path) -> dict[str, Any] | None:
        if self.process.poll() is not None:
            raise ChildProcessError(f"dispatcher serve ended with {self.process.returncode}")
        return json.loads(ready.read_text()) if ready.exists() else None

    def metric(self, series: str) -> float | None:
        """The value of a series, None while it is not exported."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=PATIENCE_S) as answer:
            lines = answer.read().decode().splitlines()
        values = [line.split()[-1] for line in lines if line.startswith(f"dispatcher_{series} ")]
        return float(values[0]) if values else None


@contextmanager
def served(folder: Path, journal: bool, command: str) -> Iterator[Served]:
    """It runs meanwhile, and no longer."""
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    options = ["--dp-size=1", f"--global-batch-size={BATCH}", "--micro-batch-size=2"]
    options += [f"--buffer-capacity={len(SAMPLES)}", f"--ready-file={ready}"]
    options += ["--listen=127.0.0.1:0", "--http=127.0.0.1:0", "--log-level=warning"]
    options += [f"--journal-dir={folder / 'journal'}"] if journal else []
    process = subprocess.Popen([command, "serve", *options])
    try:
        yield Served(process, ready, command)
    finally:
        process.kill()
        process.wait()


def push(server: Served) -> None:
    """All samples."""
    with RolloutProducer(server.endpoint) as producer:
        producer.push_many([{"input_ids": ids} for ids in SAMPLES], timeout=PATIENCE_S)
    accepted = server.metric('samples_received_total{outcome="accepted"}')
    assert accepted == len(SAMPLES), f"{accepted} accepted"


def train(rank: RankClient) -> list[int]:
    """Take and commit one step; the token ids that came."""
    step = rank.next_step(PATIENCE_S)
    assert step is not None, "the stream ended early"
    found = [int(ids) for one in step for ids in np.frombuffer(one.payload, np.int64)]
    step.commit()
    return found


def first_step(server: Served) -> list[int]:
    """One step, until the metrics say that it is committed."""
    with RankClient(server.endpoint, dp_rank=0, dp_size=1) as rank:
        found = train(rank)
        awaited(lambda: server.metric("samples_committed_total") == BATCH or None, "the commit")
    return found


def last_step(server: Served) -> list[int]:
    """The other step, and the end: of the stream, and of the dispatcher by itself."""
    with RolloutProducer(server.endpoint) as producer:
        producer.end_stream(force=True)  # for the one before it too
    with RankClient(server.endpoint, dp_rank=0, dp_size=1) as rank:
        found = train(rank)
        assert rank.next_step(PATIENCE_S) is None, "more came than was pushed"
    code = server.process.wait(PATIENCE_S)
    assert code == 0, f"dispatcher serve ended with {code}"
    return found


def run(folder: Path, journal: bool, command: str = COMMAND) -> None:
    """The whole way of the samples."""
    with served(folder, journal, command) as server:
        push(server)
        found = first_step(server)
        if not journal:
            found += last_step(server)
    if journal:
        assert server.process.returncode == -signal.SIGKILL
        with served(folder, journal, command) as server:
            found += last_step(server)
    assert sorted(found) == list(range(SAMPLES.size)), "other tokens came than were pushed"


def check_installation() -> None:
    """What is imported is what was installed, with its types, and without torch."""
    for package in (rollout_dispatcher, rollout_workers):
        home = Path(str(package.__file__)).parent
        assert home.is_relative_to(sys.prefix), f"{home} is not installed here"
        assert (home / "py.typed").exists(), f"{home} has no py.typed"
    assert find_spec("torch") is None, "torch is here"
    said = subprocess.run([COMMAND, "--version"], check=True, capture_output=True, text=True).stdout
    assert said.strip() == f"dispatcher {version('rollout-dispatcher')}", said


def check_what_is_missing(*, client: bool) -> None:
    """Who asks for what an extra brings is told which."""
    told = ""
    try:
        _ = rollout_workers.MicroBatchStream
    except ImportError as error:
        told = str(error)
    assert "pip install 'rollout-dispatcher[workers]'" in told, told or "it came without torch"
    if not client:
        return
    for package in ("aiohttp", "prometheus_client"):
        assert find_spec(package) is None, f"{package} is here"
    serve = [COMMAND, "serve", "--dp-size=1", "--global-batch-size=1", "--micro-batch-size=1"]
    done = subprocess.run(serve, check=False, capture_output=True, text=True)
    assert done.returncode == 2, done
    assert "pip install 'rollout-dispatcher[server]'" in done.stderr, done.stderr


def main() -> None:
    """Run it."""
    parser = ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--journal", action="store_true", help="use one")
    parser.add_argument("--dispatcher", help="another environment's", metavar="COMMAND")
    given = parser.parse_args()
    check_installation()
    check_what_is_missing(client=given.dispatcher is not None)
    run(given.folder, given.journal, given.dispatcher or COMMAND)


if __name__ == "__main__":
    main()
