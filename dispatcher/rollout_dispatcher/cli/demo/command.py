"""`dispatcher demo`: real processes on this machine, once per strategy, measured and compared.

Two torchrun ranks train one small transformer a strategy on CPU, each fed by a dispatcher and two
rollout producers of its own. Every strategy gets the same samples, seeds and model, and they take
turns step by step, so that what differs is who trains on what and when, and not what else the
machine was doing. The cost model that the dispatcher is given is fitted to what samples cost here,
and the number of steps follows from it, so that a slow machine does not take longer.

A run ends when all samples are trained on, or with ChildFailed as soon as any process fails or
nothing has moved for `STALL_SECONDS`; either way its processes have ended.
"""

import json
import os
import select
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

import numpy as np

from rollout_dispatcher.cli.demo.processes import ChildFailed, Children, signals_unwind
from rollout_dispatcher.cli.demo.report import summarise, table, verdict
from rollout_dispatcher.cli.options import Parser
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.service.config.values import DURATION
from rollout_dispatcher.simulate.trace import PROFILES, sample_lengths
from rollout_planner.cost import Quadratic
from rollout_planner.types import Strategy

RANKS = 2
#: Eight samples a rank and step, two at a time: what ranks get differs a lot, steps are short.
BATCH = 16
MICRO_BATCH = 2
WINDOW_MULTIPLE = 1.5
#: Mean tokens of a sample after scaling; the longest of a heavy tail are six or seven times that.
MEAN_TOKENS = 1000
#: Fewer steps prove nothing, more do not prove more.
STEPS_BETWEEN = (20, 200)
PRODUCERS = 2
#: Importing torch on a cold disk takes tens of seconds; a step takes less than one.
STALL_SECONDS = 90.0
POLL_SECONDS = 0.05
PYTHON = sys.executable
STRATEGIES = (Strategy.ROUND_ROBIN, Strategy.KK, Strategy.WINDOW)

DESCRIPTION = f"""\
Train a small transformer for real on {RANKS} torchrun ranks of this machine, once per strategy,
each with a dispatcher and two rollout producers, and compare what was measured.
"""

EPILOG = """\
examples:
  dispatcher demo
  dispatcher demo --profile reasoning-gym --seconds 30
  dispatcher demo --strategies round-robin,greedy,window --out /tmp/demo

Writes demo.json and, in demo/, each run's samples, measurements and logs.
exit codes: 0 done, 1 a process failed, 2 usage
"""


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for."""

    profile: str
    seconds: float
    seed: int
    strategies: tuple[Strategy, ...]
    out: Path


def run(argv: Sequence[str]) -> int:
    """Run the demo and print its table."""
    request = parse(argv)
    if find_spec("torch") is None or find_spec("rollout_workers") is None:
        raise ConfigError(
            "the demo trains with torch: pip install 'rollout-dispatcher[server,workers]'"
        )
    began = time.monotonic()
    with signals_unwind():
        results = compare(request)
    request.out.joinpath("demo.json").write_text(json.dumps(results, indent=2) + "\n")
    print(f"\n{textwrap.fill(verdict(results), 80, break_on_hyphens=False)}")
    print(table(results))
    print(f"\n{request.out / 'demo.json'} written; {time.monotonic() - began:.0f} s in all")
    return 0


def parse(argv: Sequence[str]) -> Request:
    """Read the arguments. Raises ConfigError."""
    parser = Parser(prog="dispatcher demo", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--profile", default="lineage", help=f"lengths: {', '.join(PROFILES)}")
    parser.add_argument("--seconds", default="12s", help="training time a strategy [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of lengths, tokens and weights [0]")
    parser.add_argument(
        "--strategies", default=",".join(STRATEGIES), help="which to compare [%(default)s]"
    )
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder [%(default)s]")
    args = parser.parse_strictly(argv)
    try:
        seconds = float(str(DURATION.parse(args.seconds)))
        strategies = tuple(Strategy(word) for word in args.strategies.split(","))
    except ValueError as error:
        raise ConfigError(f"dispatcher demo: {error}") from None
    if args.profile not in PROFILES:
        raise ConfigError(f"--profile {args.profile}: there are {', '.join(PROFILES)}")
    return Request(args.profile, seconds, args.seed, strategies, args.out.resolve())


def compare(request: Request) -> dict[str, object]:
    """Run every strategy on the same load; returns what demo.json holds."""
    progress = Progress(sys.stderr)
    folder = request.out / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    environ = child_environment()
    progress.show("measuring what samples cost on this machine")
    timings = calibrate(folder, environ)
    load = make_load(request.profile, request.seed, request.seconds, timings)
    progress.note(
        f"{load.steps} steps of {load.batch} samples on {RANKS} ranks, lengths of {request.profile}"
        f" ({min(load.lengths)} to {max(load.lengths)} tokens), cost {load.cost}"
    )
    train(request.strategies, load, folder, environ, progress)
    measured = {str(strategy): summarise(folder / strategy) for strategy in request.strategies}
    return {"load": load.summary(), "strategies": measured}


def child_environment() -> dict[str, str]:
    """Ours, one thread a process, on loopback, without settings meant for another dispatcher."""
    environ = {
        name: text for name, text in os.environ.items() if not name.startswith("DISPATCHER_")
    }
    environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environ["GLOO_SOCKET_IFNAME"] = "lo"
    return environ


# -- what is trained on -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timings:
    """Least processor seconds to train on one sample, by its tokens.

    slowdown: wall clock over processor time, more than 1 on a machine that others use too.
    """

    lengths: Sequence[int]
    seconds: Sequence[float]
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """The samples of a run; `lengths` in the order in which producers push them."""

    profile: str
    seed: int
    lengths: list[int]
    batch: int
    cost: str

    @property
    def steps(self) -> int:
        """Steps that these samples make."""
        return len(self.lengths) // self.batch

    def summary(self) -> dict[str, object]:
        """What demo.json tells of it."""
        return {
            "profile": self.profile,
            "seed": self.seed,
            "steps": self.steps,
            "samples": len(self.lengths),
            "tokens": sum(self.lengths),
            "ranks": RANKS,
            "global_batch_size": self.batch,
            "window": WINDOW_MULTIPLE,
            "cost": self.cost,
        }


def make_load(profile: str, seed: int, seconds: float, timings: Timings) -> Load:
    """As many whole steps as train in about `seconds`, going by `timings`."""
    cost = fit(timings)
    drawn = sample_lengths(profile, STEPS_BETWEEN[1] * BATCH, np.random.default_rng(seed))
    scaled = np.rint(drawn * (MEAN_TOKENS / drawn.mean())).astype(np.int64)
    lengths = np.maximum(scaled, 2)  # a prompt and an answer
    a_step = float(cost(lengths).mean()) * BATCH / RANKS * timings.slowdown
    steps = int(np.clip(round(seconds / a_step), *STEPS_BETWEEN))
    text = f"quadratic:{cost.a:.4g},{cost.b:.4g},{cost.c:.4g}"
    return Load(profile, seed, lengths[: steps * BATCH].tolist(), BATCH, text)


def fit(timings: Timings) -> Quadratic:
    """The a*s*s + b*s + d, none of them negative, of the least relative errors."""
    s = np.array(timings.lengths, dtype=np.float64)
    t = np.array(timings.seconds, dtype=np.float64)
    terms = np.stack([s * s, s, np.ones_like(s)], axis=1) / t[:, None]
    used = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(terms[:, used], np.ones_like(t), rcond=None)
        if (found >= 0).all():
            break
        used.pop(int(found.argmin()))  # a coefficient that wants to be negative is zero
    coefficients = dict.fromkeys(range(3), 0.0) | dict(zip(used, found.tolist(), strict=True))
    return Quadratic(*coefficients.values())


# -- processes --------------------------------------------------------------------------------


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
        "global-batch-size": load.batch,
        "micro-batch-size": MICRO_BATCH,
        "window": WINDOW_MULTIPLE,
        "strategy": strategy,
        "sync": "step",  # DDP with no_sync: ranks meet once a step
        "cost": load.cost,
        "listen": "127.0.0.1:0",
        "http": "127.0.0.1:0",
        "ready-file": ready,
        "log-level": "warning",
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    flags += ["--set", "drain-timeout=1s"]
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
