"""`dispatcher demo`: real processes on this machine, once per strategy, measured and compared.

Two torchrun ranks train one small transformer a strategy on CPU, each fed by a dispatcher and two
rollout producers of its own. Every strategy gets the same samples, seeds and model, and they take
turns step by step, so that what differs is who trains on what and when, and not what else the
machine was doing. Nothing is left running, however it ends.
"""

import json
import os
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rollout_dispatcher.cli.demo.load import RANKS, Load, make_load
from rollout_dispatcher.cli.demo.processes import signals_unwind
from rollout_dispatcher.cli.demo.report import summarise, table, verdict
from rollout_dispatcher.cli.demo.run import Progress, calibrate, train
from rollout_dispatcher.cli.options import Parser
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.service.config.values import DURATION
from rollout_dispatcher.simulate.profiles import PROFILES
from rollout_planner.types import Strategy

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
        raise ConfigError("the demo trains with torch: pip install 'rollout-dispatcher[workers]'")
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
    progress.note(describe(request, load))
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


def describe(request: Request, load: Load) -> str:
    """The load in one line."""
    return (
        f"{load.steps} steps of {load.batch} samples on {RANKS} ranks, lengths of {request.profile}"
        f" ({min(load.lengths)} to {max(load.lengths)} tokens), cost {load.cost}"
    )
