"""`dispatcher report`: the HTML page of a simulation that was saved with `--json`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rollout_dispatcher.cli.options import Parser
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.simulate.report.page import page
from rollout_dispatcher.simulate.result import Result

DESCRIPTION = "Turn what `dispatcher simulate --json` printed into an HTML page with plots."
EPILOG = """\
example:
  dispatcher simulate lineage --dp-size 8 --dispatch-batch-size 64 --micro-batch-size 1 \\
      --json > result.json
  dispatcher report result.json -o report.html
"""


def run(argv: Sequence[str]) -> int:
    """Read the result and write the page."""
    parser = Parser(prog="dispatcher report", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "result", metavar="FILE.json", help="the saved result; - reads it from stdin"
    )
    parser.add_argument("-o", "--output", metavar="FILE.html", required=True, help="the page")
    values = parser.parse_strictly(argv)
    try:
        text = sys.stdin.read() if values.result == "-" else _read(Path(values.result))
        html = page(Result.from_json(text))
    except UnicodeDecodeError:
        raise ConfigError(f"{values.result} is not UTF-8 text") from None
    try:
        Path(values.output).write_text(html, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{values.output} cannot be written: {error.strerror}") from None
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
