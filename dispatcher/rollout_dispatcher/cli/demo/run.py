"""Runs the demo's processes: for each strategy one dispatcher and two producers, and two ranks.

A run ends when all samples are trained on, or with ChildFailed as soon as any process fails or
nothing has moved for `STALL_SECONDS`; either way its processes have ended.
"""

import json
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rollout_dispatcher.cli.demo.load import MICRO_BATCH, RANKS, WINDOW_MULTIPLE, Load, Timings
from rollout_dispatcher.cli.demo.processes import ChildFailed, Children
from rollout_planner.types import Strategy

PRODUCERS = 2
#: Importing torch on a cold disk takes tens of seconds; a step takes less than one.
STALL_SECONDS = 90.0
POLL_SECONDS = 0.05
PYTHON = sys.executable


class Progress:
    """One live line on a terminal; elsewhere a line now and then."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()

    def show(self, text: str, *, milestone: bool = True) -> None:
        """Replace the live line; without a terminal only milestones are printed."""
        if self._live:
            self._stream.write(f"\r\x1b[K{text}")
        elif milestone:
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def note(self, text: str) -> None:
        """A line that stays."""
        self._stream.write(f"\r\x1b[K{text}\n" if self._live else f"{text}\n")
        self._stream.flush()


def calibrate(folder: Path, environ: Mapping[str, str]) -> Timings:
    """Measure what samples cost, in a process of its own as it needs torch."""
    with Children(folder, environ) as children:
        children.start("calibrate", [PYTHON, "-m", "rollout_workers.demo.calibrate"], piped=True)
        lines = [line for line in _lines(children, "calibrate") if line]
        children.wait_until_ended("calibrate", STALL_SECONDS)
    measured = json.loads(lines[-1])
    return Timings(measured["lengths"], measured["seconds"], measured["slowdown"])


@dataclass(frozen=True, slots=True)
class Service:
    """A dispatcher that serves one strategy, and where its run's measurements go."""

    strategy: Strategy
    folder: Path
    sample_plane: str
    http_plane: str


def train(
    strategies: Sequence[Strategy],
    load: Load,
    folder: Path,
    environ: Mapping[str, str],
    progress: Progress,
) -> None:
    """Train on the whole load once a strategy, the strategies taking turns.

    Afterwards `folder`/<strategy> holds each rank's measurements and the dispatcher's metrics.
    """
    with Children(folder, environ) as children:
        progress.show("starting dispatchers, producers and trainers")
        services = [_start_dispatcher(children, item, load, folder) for item in strategies]
        producers = {item: _start_producers(children, item, load) for item in services}
        _start_trainers(children, folder, services, load.seed)
        watched = [f"dispatcher-{item}" for item in strategies]
        watched += [name for names in producers.values() for name in names]
        losses: dict[str, str] = {}
        done = 0
        for line in _lines(children, "trainers", *watched):
            for service, names in list(producers.items()):
                if all(children.has_ended(name) for name in names):
                    _end_stream(children, service)
                    del producers[service]
            if line.startswith("step "):
                _, name, _, losses[name] = line.split()
                done += 1
                _show(progress, done, load.steps * len(strategies), losses)
        for name in ("trainers", *watched):
            children.wait_until_ended(name, STALL_SECONDS)


def _show(progress: Progress, done: int, steps: int, losses: Mapping[str, str]) -> None:
    shown = "  ".join(f"{name} {loss}" for name, loss in losses.items())
    progress.show(f"step {done}/{steps}  loss: {shown}", milestone=done % (steps // 5 or 1) == 0)


def _start_dispatcher(children: Children, strategy: Strategy, load: Load, folder: Path) -> Service:
    """Start a dispatcher on free ports; returns once it serves."""
    place = folder / strategy
    place.mkdir(exist_ok=True)
    ready = place / "ready.json"
    ready.unlink(missing_ok=True)
    options = {
        "dp-size": RANKS,
        "dispatch-batch-size": load.batch,
        "micro-batch-size": MICRO_BATCH,
        "window-multiple": WINDOW_MULTIPLE,
        "strategy": strategy,
        "sync": "step",  # DDP with no_sync: ranks meet once a step
        "cost": load.cost,
        "listen": "127.0.0.1:0",
        "http": "127.0.0.1:0",
        "ready-file": ready,
        "drain-timeout": "1s",
        "log-level": "warning",
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    name = f"dispatcher-{strategy}"
    children.start(name, [PYTHON, "-m", "rollout_dispatcher.cli.main", "serve", *flags])
    deadline = time.monotonic() + STALL_SECONDS
    while not ready.exists():
        if children.has_ended(name) or time.monotonic() > deadline:
            raise ChildFailed(f"{name} did not serve; see {children.log(name)}")
        time.sleep(POLL_SECONDS)
    addresses = json.loads(ready.read_text())
    return Service(strategy, place, addresses["listen"][0], addresses["http"])


def _start_producers(children: Children, service: Service, load: Load) -> list[str]:
    lengths = service.folder / "lengths.json"
    lengths.write_text(json.dumps(load.lengths))
    names = [f"producer-{service.strategy}-{part}" for part in range(PRODUCERS)]
    for part, name in enumerate(names):
        share = ["--lengths", str(lengths), "--part", str(part), str(PRODUCERS)]
        children.start(name, [*_producer(service), *share, "--seed", str(load.seed)])
    return names


def _end_stream(children: Children, service: Service) -> None:
    """All is pushed: only someone who knows all producers can say so."""
    children.start(f"end-{service.strategy}", [*_producer(service), "--end-stream"])


def _producer(service: Service) -> list[str]:
    return [PYTHON, "-m", "rollout_workers.demo.producer", "--endpoint", service.sample_plane]


def _start_trainers(
    children: Children, folder: Path, services: Sequence[Service], seed: int
) -> None:
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    train = [
        "--log-dir",
        str(folder / "torchrun"),
        "--nproc-per-node",
        str(RANKS),
        "-m",
        "rollout_workers.demo.train",
        "--seed",
        str(seed),
    ]
    for item in services:
        train += ["--stream", str(item.folder), item.sample_plane, item.http_plane]
    children.start("trainers", [*torchrun, *train], piped=True)


def _lines(children: Children, name: str, *others: str) -> Iterator[str]:
    """Lines that a child prints, until it ends; an empty one whenever there was none for a while.

    Raises ChildFailed if any of the children fails, or this one is silent for too long.
    """
    source, rest, heard = children.output(name), b"", time.monotonic()
    while True:
        if select.select([source], [], [], POLL_SECONDS)[0]:
            data = os.read(source, 65536)
            if not data:
                return
            heard = time.monotonic()
            *lines, rest = (rest + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
        elif time.monotonic() - heard > STALL_SECONDS:
            raise ChildFailed(
                f"{name} was silent for {STALL_SECONDS:g} s; see {children.log(name)}"
            )
        for other in others:
            children.has_ended(other)
        yield ""
