"""`dispatcher trace`: a recorded run as a file that Perfetto opens."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rollout_dispatcher.cli.options import Parser
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.record.recording import load_recording
from rollout_dispatcher.simulate.recorded.perfetto import trace_json

DESCRIPTION = """\
Write a recorded run as a trace: what each DP rank did, step by step, the dispatcher's steps from
plan to commit, what was waited for, and what was held. Open it at https://ui.perfetto.dev (the file
stays on your machine) or chrome://tracing."""
EPILOG = """\
examples:
  dispatcher serve ... --record /var/lib/dispatcher/record
  dispatcher trace /var/lib/dispatcher/record -o trace.json

exit codes: 0 written, 1 failure, 2 usage, or no record
"""


def run(argv: Sequence[str]) -> int:
    """Read the record and write the trace."""
    parser = Parser(prog="dispatcher trace", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("record", metavar="DIR", help="what serve --record wrote")
    parser.add_argument("-o", "--output", metavar="FILE.json", required=True, help="the trace")
    parser.add_argument("--run", metavar="ID", help="of a record with several runs, this one")
    values = parser.parse_strictly(argv)
    recording = load_recording(Path(values.record), values.run)
    for note in recording.notes:
        print(f"dispatcher trace: {note}", file=sys.stderr)
    try:
        with Path(values.output).open("w", encoding="utf-8") as file:
            file.writelines(trace_json(recording))
    except OSError as error:
        raise ConfigError(f"{values.output} cannot be written: {error.strerror}") from None
    return 0
