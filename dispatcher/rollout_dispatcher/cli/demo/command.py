"""`dispatcher demo`: trains on this machine, once per strategy, and compares.

Two torchrun ranks train one small transformer per strategy on CPU, each with its own dispatcher and
two rollout producers. All strategies get the same samples, seeds and model. Their steps alternate,
so other load of the machine affects all of them alike. The cost model is fitted to this machine
first; the number of steps follows from it, so a slow machine does not take longer.

A run ends when all samples are trained on, or with ChildFailed as soon as a process fails or
nothing progresses for `STALL_SECONDS`. All its processes have ended then.
"""

import json
import os
import select
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

import numpy as np

from rollout_dispatcher.cli.ask import seconds_of
from rollout_dispatcher.cli.demo.processes import ChildFailed, Children, signals_unwind
from rollout_dispatcher.cli.demo.report import summarise, table, verdict
from rollout_dispatcher.cli.options import Parser
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.simulate.trace import PROFILES, sample_lengths
from rollout_planner.cost import Quadratic
from rollout_planner.types import Strategy

RANKS = 2
#: Eight samples per rank and step, two at a time: ranks differ a lot, and steps are short.
BATCH = 16
MICRO_BATCH = 2
WINDOW_MULTIPLE = 1.5
#: Mean tokens of a sample after scaling; the longest have six or seven times as many.
MEAN_TOKENS = 1000
#: Least and most steps of a run.
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


def run(argv: Sequence[str]) -> int:
    """Run the demo and print its table."""
    args = _parse(argv)
    if find_spec("torch") is None or find_spec("rollout_workers") is None:
        raise ConfigError(
            "the demo trains with torch: pip install 'rollout-dispatcher[server,workers]'"
        )
    began = time.monotonic()
    with signals_unwind():
        results = _compare(args)
    args.out.joinpath("demo.json").write_text(json.dumps(results, indent=2) + "\n")
    print(f"\n{textwrap.fill(verdict(results), 80, break_on_hyphens=False)}")
    print(table(results))
    print(f"\n{args.out / 'demo.json'} written; {time.monotonic() - began:.0f} s in all")
    return 0


def _parse(argv: Sequence[str]) -> Namespace:
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
    args.seconds, args.out = seconds_of("--seconds", args.seconds), args.out.resolve()
    try:
        args.strategies = tuple(Strategy(word) for word in args.strategies.split(","))
    except ValueError as error:
        raise ConfigError(f"dispatcher demo: {error}") from None
    if args.profile not in PROFILES:
        raise ConfigError(f"--profile {args.profile}: there are {', '.join(PROFILES)}")
    return args


def _compare(args: Namespace) -> dict[str, object]:
    """Run every strategy on the same load; returns the content of demo.json."""
    progress = Progress(sys.stderr)
    folder = args.out / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    environ = child_environment()
    progress.show("measuring what samples cost on this machine")
    timings = calibrate(folder, environ)
    load = make_load(args.profile, args.seed, args.seconds, timings)
    progress.note(
        f"{load.steps} steps of {load.batch} samples on {RANKS} ranks, lengths of {args.profile}"
        f" ({min(load.lengths)} to {max(load.lengths)} tokens), cost {load.cost}"
    )
    train(args.strategies, load, folder, environ, progress)
    measured = {str(strategy): summarise(folder / strategy) for strategy in args.strategies}
    return {"load": load.summary(), "strategies": measured}


def child_environment() -> dict[str, str]:
    """Our environment, with one thread per process, on loopback, without DISPATCHER_ variables."""
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

    slowdown: wall clock over processor time, above 1 on a machine with other load.
    """

    lengths: Sequence[int]
    seconds: Sequence[float]
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """The samples of a run; `lengths` in order of arrival."""

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
        """The load as demo.json has it."""
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
    """As many whole steps as train in about `seconds`, by `timings`."""
    cost = fit(timings)
    drawn = sample_lengths(profile, STEPS_BETWEEN[1] * BATCH, np.random.default_rng(seed))
    scaled = np.rint(drawn * (MEAN_TOKENS / drawn.mean())).astype(np.int64)
    lengths = np.maximum(scaled, 2)  # a prompt and an answer
    a_step = float(cost(lengths).mean()) * BATCH / RANKS * timings.slowdown
    steps = int(np.clip(round(seconds / a_step), *STEPS_BETWEEN))
    text = f"quadratic:{cost.a:.4g},{cost.b:.4g},{cost.c:.4g}"
    return Load(profile, seed, lengths[: steps * BATCH].tolist(), BATCH, text)


def fit(timings: Timings) -> Quadratic:
    """Fit a*s*s + b*s + c, no coefficient negative, with the least relative errors."""
    s = np.array(timings.lengths, dtype=np.float64)
    t = np.array(timings.seconds, dtype=np.float64)
    terms = np.stack([s * s, s, np.ones_like(s)], axis=1) / t[:, None]
    used = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(terms[:, used], np.ones_like(t), rcond=None)
        if (found >= 0).all():
            break
        used.pop(int(found.argmin()))  # a negative coefficient is set to zero
    coefficients = dict.fromkeys(range(3), 0.0) | dict(zip(used, found.tolist(), strict=True))
    return Quadratic(*coefficients.values())


# -- processes --------------------------------------------------------------------------------


class Progress:
    """One live line on a terminal; elsewhere a line for each milestone."""

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
        """Print a line that stays."""
        self._stream.write(f"\r\x1b[K{text}\n" if self._live else f"{text}\n")
        self._stream.flush()


def calibrate(folder: Path, environ: Mapping[str, str]) -> Timings:
    """Measure the cost of samples, in another process as it needs torch."""
    with Children(folder, environ) as children:
        children.start("calibrate", [PYTHON, "-m", "rollout_workers.demo.calibrate"], piped=True)
        lines = [line for line in _lines(children, "calibrate") if line]
        children.wait_until_ended("calibrate", STALL_SECONDS)
    measured = json.loads(lines[-1])
    return Timings(measured["lengths"], measured["seconds"], measured["slowdown"])


@dataclass(frozen=True, slots=True)
class Service:
    """A dispatcher that serves one strategy, and the folder of its run's measurements."""

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
    """Train on the whole load once per strategy, their steps alternating.

    Afterwards `folder`/<strategy> has each rank's measurements and the dispatcher's metrics.
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
                    # Each producer knows its own samples only; all of them are pushed now.
                    end = [*_producer(service), "--end-stream"]
                    children.start(f"end-{service.strategy}", end)
                    del producers[service]
            if line.startswith("step "):
                _, name, number, losses[name] = line.split()
                done += 1
                shown = "  ".join(f"{name} {loss}" for name, loss in losses.items())
                milestone = done % (load.steps * len(strategies) // 5 or 1) == 0
                at = f"{name}: step {int(number) + 1} of {load.steps}"
                progress.show(f"{at}  loss: {shown}", milestone=milestone)
        for name in ("trainers", *watched):
            children.wait_until_ended(name, STALL_SECONDS)


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


def _producer(service: Service) -> list[str]:
    return [PYTHON, "-m", "rollout_workers.demo.producer", "--endpoint", service.sample_plane]


def _start_trainers(
    children: Children, folder: Path, services: Sequence[Service], seed: int
) -> None:
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    train = [
        "--log-dir", str(folder / "torchrun"), "--nproc-per-node", str(RANKS),
        "-m", "rollout_workers.demo.train", "--seed", str(seed),
    ]  # fmt: skip
    for item in services:
        train += ["--stream", str(item.folder), item.sample_plane, item.http_plane]
    children.start("trainers", [*torchrun, *train], piped=True)


def _lines(children: Children, name: str, *others: str) -> Iterator[str]:
    """Lines that a child prints, until it ends; an empty one every POLL_SECONDS without any.

    Raises ChildFailed if a child fails, or this one prints nothing for STALL_SECONDS.
    """
    source, rest, last = children.output(name), b"", time.monotonic()
    while True:
        if select.select([source], [], [], POLL_SECONDS)[0]:
            data = os.read(source, 65536)
            if not data:
                return
            last = time.monotonic()
            *lines, rest = (rest + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
        elif time.monotonic() - last > STALL_SECONDS:
            raise ChildFailed(
                f"{name} was silent for {STALL_SECONDS:g} s; see {children.log(name)}"
            )
        for other in others:
            children.has_ended(other)
        yield ""
