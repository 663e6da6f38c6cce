"""`dispatcher calibrate`: what samples cost, fitted to what micro-batches took."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout_dispatcher.cli.asking.credentials import add_credentials
from rollout_dispatcher.cli.asking.wait_ready import add_address
from rollout_dispatcher.cli.options import Parser
from rollout_dispatcher.cli.recorded import own_setting
from rollout_dispatcher.cli.top.command import source_of
from rollout_dispatcher.cli.top.source import NoAnswer
from rollout_dispatcher.core.measuring.cost_in_use import CostInUse, Timing
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.record.recording import RecordedStep, Recording, load_recording
from rollout_dispatcher.simulate.recorded.as_it_ran import main_pass
from rollout_dispatcher.simulate.recorded.course import slowness

DESCRIPTION = """\
Print what samples cost as serve and simulate take it, fitted to what micro-batches took: of a
recorded run, or of a dispatcher that serves now."""
EPILOG = """\
examples:
  dispatcher calibrate /var/lib/dispatcher/record     # what serve --record wrote
  dispatcher calibrate --http 127.0.0.1:9471          # a dispatcher that serves
  dispatcher simulate lineage ... $(dispatcher calibrate /var/lib/dispatcher/record | head -1)

serve --cost auto does the same while it runs. The first line is the option, what follows says how
sure it is. The part of a micro-batch itself, the last number, is what another one has to save.

exit codes: 0 done, 1 nothing was measured, or no answer, 2 usage
"""


def run(argv: Sequence[str]) -> int:
    """Print it. Raises NoAnswer while nothing can be told."""
    parser = Parser(prog="dispatcher calibrate", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("record", metavar="DIR", nargs="?", help="a recorded run")
    parser.add_argument("--run", metavar="ID", help="of a record with several runs, this one")
    add_address(parser, ready_file="ask the dispatcher that writes this file")
    add_credentials(parser)
    args = parser.parse_strictly(argv)
    if args.record is not None:
        lines = _of_record(load_recording(Path(args.record), args.run))
    elif args.run is not None:
        raise ConfigError("--run chooses a run of a record; give its DIR")
    else:
        source = source_of(args, os.environ)
        try:
            lines = _of_service(source.read().status)
        finally:
            source.close()
    print("\n".join(lines))
    return 0


def _of_record(recording: Recording) -> list[str]:
    setting = own_setting(recording)
    cost, seen = CostInUse(setting.core.cost), 0
    steps = recording.trained()
    slow = slowness(steps)
    for step in steps:
        timing = _timing(recording, step, slow)
        if timing is not None:
            cost.measured(timing, step.number + 1)
            seen += 1
    at = cost.statistics()
    if at.newest is None or at.error is None:
        raise NoAnswer(
            f"{recording.name}: of {len(steps)} steps {seen} were measured, which is too little"
        )
    return _told(str(at.newest), at.error, at.loss, f"{seen} steps")


def _timing(recording: Recording, step: RecordedStep, slow: np.ndarray | None) -> Timing | None:
    compute = main_pass(step)
    if compute is None:
        return None
    tokens = [recording.samples[step.run, ticket].tokens for ticket in step.tickets]
    counts = [[len(part) for part in rank] for rank in step.micro_batches]
    return Timing(
        np.array(tokens), np.array(counts), step.cost, compute, step.slowness,
        np.ones(step.dp_size) if slow is None else slow, step.sync,
    )  # fmt: skip


def _of_service(status: Mapping[str, Any]) -> list[str]:
    measured = status["measured"]
    found = measured.get("cost", {})
    if not found.get("fitted"):
        raise NoAnswer(
            "the dispatcher has not measured enough to tell: "
            + (measured["why_not"] or "its first steps are still to come")
        )
    return _told(found["fitted"], found["error"], found["loss"], "the last micro-batches")


def _told(cost: str, error: float, loss: float | None, of: str) -> list[str]:
    return [
        f"--cost {cost}",
        f"fitted to {of}; a micro-batch strays from it by {error:.1%}, as a rule",
        f"the cost that these plans balanced has lost {loss or 0:.1%} of the ranks' time by it",
    ]
