"""Commands that read a recorded run: `report` makes a page of it, `calibrate` prints the fitted
cost of its samples.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from rollout_dispatcher.cli.ask import Client, NoAnswer, add_address, add_credentials
from rollout_dispatcher.cli.options import Parser
from rollout_dispatcher.cli.simulate_options import own_setting
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.record.recording import Recording, load_recording
from rollout_dispatcher.simulate.page import page
from rollout_dispatcher.simulate.recorded import fitted_cost

REPORT = "Make an HTML page of a recorded run: what balancing bought, by rank and over time."
REPORT_EPILOG = """\
examples:
  dispatcher serve ... --record-dir /var/lib/dispatcher/record
  dispatcher report /var/lib/dispatcher/record -o report.html
"""
CALIBRATE = """\
Print what samples cost as serve and simulate take it, fitted to what micro-batches took: of a
recorded run, or of a dispatcher that serves now."""
CALIBRATE_EPILOG = """\
examples:
  dispatcher calibrate /var/lib/dispatcher/record     # what serve --record-dir wrote
  dispatcher calibrate --http 127.0.0.1:9471          # a dispatcher that serves
  dispatcher simulate lineage ... $(dispatcher calibrate /var/lib/dispatcher/record | head -1)

serve --cost auto does the same while it runs. The first line is the option, what follows says how
sure it is. The part of a micro-batch itself, the last number, is what another one has to save.

exit codes: 0 done, 1 nothing was measured, or no answer, 2 usage
"""


def report(argv: Sequence[str]) -> int:
    """Write the page of a record."""
    parser = Parser(prog="dispatcher report", description=REPORT, epilog=REPORT_EPILOG)
    parser.add_argument("record", metavar="DIR", help="what serve --record-dir wrote")
    parser.add_argument("-o", "--output", metavar="FILE.html", required=True, help="the page")
    parser.add_argument("--run", metavar="ID", help="of a record with several runs, this one")
    args = parser.parse_strictly(argv)
    recording = load_recording(Path(args.record), args.run)
    text = page(recording, own_setting(recording))
    try:
        Path(args.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{args.output} cannot be written: {error.strerror}") from None
    return 0


# -- calibrate --------------------------------------------------------------------------------


def calibrate(argv: Sequence[str]) -> int:
    """Print the fitted cost. Raises NoAnswer while too little was measured."""
    parser = Parser(prog="dispatcher calibrate", description=CALIBRATE, epilog=CALIBRATE_EPILOG)
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
        lines = _of_service(Client(args, os.environ))
    print("\n".join(lines))
    return 0


def _of_record(recording: Recording) -> list[str]:
    at, seen = fitted_cost(recording, own_setting(recording).core.cost)
    if at.newest is None or at.error is None:
        raise NoAnswer(
            f"{recording.name}: of {len(recording.trained())} steps {seen} were measured, which is "
            "too little"
        )
    return _report(str(at.newest), at.error, at.loss, f"{seen} steps")


def _of_service(client: Client) -> list[str]:
    try:
        measured = json.loads(client.read())["measured"]
        found, why = measured.get("cost", {}), measured["why_not"]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise NoAnswer("what answers there is no dispatcher of this release") from None
    finally:
        client.close()
    if not found.get("fitted"):
        raise NoAnswer(
            "the dispatcher has not measured enough yet: "
            + (why or "its first steps are still to come")
        )
    return _report(found["fitted"], found["error"], found["loss"], "the last micro-batches")


def _report(cost: str, error: float, loss: float | None, of: str) -> list[str]:
    return [
        f"--cost {cost}",
        f"fitted to {of}; typical residual of a micro-batch {error:.1%}",
        f"the cost that these plans balanced has lost {loss or 0:.1%} of the ranks' time by it",
    ]
