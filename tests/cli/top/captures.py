"""The picture in docs/top.md, taken of a real run in a real terminal.

python -m tests.cli.top.captures    takes it again, in about a minute; it needs tmux
"""

import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.generated import rewrite
from tests.support.server import ServeProcess
from tests.support.slow_rank import OPTIONS, SlowRankRun
from tests.support.source import ROOT
from tests.support.terminal import Terminal

DOCUMENT = ROOT / "docs/top.md"
SIZES = {"narrow": (80, 24)}
#: Long enough that rates are those of a whole half minute.
WATCHED_SECONDS = 45.0


def take() -> dict[str, str]:
    """A picture of each size, of one run."""
    pictures = {}
    with (
        TemporaryDirectory() as folder,
        ServeProcess(Path(folder), http="127.0.0.1:9471", checked=False, **OPTIONS) as server,
        SlowRankRun(server.endpoint),
        Terminal(Path(folder), "tmux", width=80, height=24) as terminal,
    ):
        terminal.type(f"{sys.executable} -m rollout_dispatcher.cli.main top")
        time.sleep(WATCHED_SECONDS)
        for name, (width, height) in SIZES.items():
            terminal.resize(width, height)
            time.sleep(3)
            pictures[name] = terminal.text()
    return pictures


def _fenced(picture: str) -> str:
    return f"```text\n{picture}\n```"


def main() -> None:
    """Put them into the document."""
    rewrite(DOCUMENT, {name: partial(_fenced, text) for name, text in take().items()})


if __name__ == "__main__":
    main()
