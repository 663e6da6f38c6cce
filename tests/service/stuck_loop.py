"""`dispatcher serve`, whose event loop is stuck for good once the file `STUCK` is there.

`STUCK.now` is there as soon as it is.
"""

import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from rollout_dispatcher.cli.main import main
from rollout_dispatcher.service.reporter import StallLog


def be_stuck() -> NoReturn:
    """As a callback that waits for something would be."""
    Path(os.environ["STUCK"] + ".now").touch()
    while True:
        time.sleep(60)


def _check(stalls: StallLog, now: float) -> None:
    if Path(os.environ["STUCK"]).exists():
        be_stuck()


if __name__ == "__main__":
    setattr(StallLog, "check", _check)  # noqa: B010
    sys.exit(main())
