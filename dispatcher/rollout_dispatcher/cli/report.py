"""`dispatcher report`: the HTML page of a recorded run, or of a simulation that was saved."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rollout_dispatcher.cli.options import Parser
from rollout_dispatcher.cli.recorded import own_setting
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.record.recording import load_recording
from rollout_dispatcher.simulate.recorded.page import recorded_page
from rollout_dispatcher.simulate.report.page import page
from rollout_dispatcher.simulate.result import Result

DESCRIPTION = """\
Make an HTML page with plots, which needs no other file: of a recorded run, what balancing bought,
by rank and over time; of a simulation, which window is worth it."""
EPILOG = """\
examples:
  dispatcher serve ... --record /var/lib/dispatcher/record
  dispatcher report /var/lib/dispatcher/record -o report.html
  dispatcher simulate lineage --dp-size 8 --dispatch-batch-size 64 --micro-batch-size 1 \\
      --json > result.json
  dispatcher report result.json -o report.html
"""


def run(argv: Sequence[str]) -> int:
    """Read the result and write the page."""
    parser = Parser(prog="dispatcher report", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "source",
        metavar="DIR|FILE.json",
        help="what serve --record wrote, or what simulate --json printed (- reads it from stdin)",
    )
    parser.add_argument("-o", "--output", metavar="FILE.html", required=True, help="the page")
    parser.add_argument("--run", metavar="ID", help="of a record with several runs, this one")
    values = parser.parse_strictly(argv)
    try:
        html = _page(values.source, values.run)
    except UnicodeDecodeError:
        raise ConfigError(f"{values.source} is not UTF-8 text") from None
    try:
        Path(values.output).write_text(html, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{values.output} cannot be written: {error.strerror}") from None
    return 0


def _page(source: str, run: str | None) -> str:
    if Path(source).is_dir():
        recording = load_recording(Path(source), run)
        return recorded_page(recording, own_setting(recording))
    if run is not None:
        raise ConfigError("--run chooses a run of a record, and this is no directory")
    text = sys.stdin.read() if source == "-" else _read(Path(source))
    return page(Result.from_json(text))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
