"""What is trained in one go: rows that take turns over the same samples, fed each its own way."""

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollout_dispatcher.cli.demo.processes import Children
from rollout_workers import RolloutProducer
from rollout_workers.demo.data import rollout
from tests.bench.training.orders import ORDERS, Work
from tests.bench.training.rows import Measured
from tests.support.server import ServeProcess
from tests.support.source import PYTHONPATH
from tests.support.torchrun import torchrun_command

#: Importing torch on a cold disk takes tens of seconds.
PATIENCE_S = 120.0
POLL_S = 0.02
#: Row -> its window, of the rows that a dispatcher feeds. The second is the default.
WINDOWS = {"ours-window-1": 1.0, "ours": 1.5}


@dataclass(frozen=True, slots=True)
class Case:
    """Rows to be compared. rate: samples that arrive a second; None: all are there at once."""

    name: str
    rows: tuple[str, ...]
    rate: float | None = None

    def title(self, row: str) -> str:
        """How a row is called among those of all cases."""
        return f"{self.name}:{row}" if self.name else row


def measure(case: Case, work: Work, folder: Path) -> dict[str, Measured]:
    """Train the case's rows over all samples, step by step in turn."""
    what = case.name or "all rows"
    print(f"{what}: {', '.join(case.rows)} over {len(work.lengths)} samples ...", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "began").unlink(missing_ok=True)
    with ExitStack() as stack:
        feeds = [row for row in case.rows if row in WINDOWS]
        endpoints = {
            row: stack.enter_context(_dispatcher(folder / row, work, WINDOWS[row])) for row in feeds
        }
        job = {
            "work": asdict(work),
            "rate": case.rate,
            "rows": [(row, endpoints.get(row)) for row in case.rows],
        }
        (folder / "job.json").write_text(json.dumps(job))
        children = stack.enter_context(Children(folder, os.environ | {"PYTHONPATH": PYTHONPATH}))
        pool = stack.enter_context(ThreadPoolExecutor(max(1, len(feeds))))
        children.start("ranks", _torchrun(folder, work.ranks))
        pushing = [
            pool.submit(_push_all, at, work, case.rate, folder / "began")
            for at in endpoints.values()
        ]
        children.wait_until_ended("ranks", 10 * PATIENCE_S)
        for push in pushing:
            push.result()
    return {case.title(row): Measured.of(folder, row) for row in case.rows}


def _torchrun(folder: Path, ranks: int) -> list[str]:
    return [*torchrun_command(ranks, folder), "-m", "tests.bench.training.ranks", str(folder)]


@contextmanager
def _dispatcher(folder: Path, work: Work, window: float) -> Iterator[str]:
    folder.mkdir(exist_ok=True)
    options: dict[str, Any] = {
        "dp_size": work.ranks,
        "global_batch_size": work.batch,
        "micro_batch_tokens": work.budget,
        "on_oversize": "alone",
        "window": window,
        "sync": "step",  # DDP with no_sync: ranks meet once a step
        "cost": work.cost,
        "drain_timeout": "1s",
    }
    with ServeProcess(folder, checked=False, **options) as server:
        yield server.endpoint


def _push_all(endpoint: str, work: Work, rate: float | None, began: Path) -> None:
    """Push what was made beforehand, each sample at its time; waits while the buffer is full."""
    samples = [rollout(index, tokens, work.seed) for index, tokens in enumerate(work.lengths)]
    with RolloutProducer(endpoint) as producer:
        start = _clock(began) if rate is not None else 0.0
        for index, sample in enumerate(samples):
            if rate is not None:
                time.sleep(max(0.0, start + index / rate - time.monotonic()))
            producer.push(sample)
        producer.end_stream()


def _clock(began: Path) -> float:
    """When the ranks begin, on the machine's monotonic clock."""
    deadline = time.monotonic() + PATIENCE_S
    while not (began.exists() and began.read_text()):
        assert time.monotonic() < deadline, "the ranks did not begin"
        time.sleep(POLL_S)
    return float(began.read_text())


#: All ways, without and with a choice.
COMPARED = (*ORDERS, *WINDOWS)
