"""`dispatcher serve`, whose disk hangs as one over the network may.

While the file `STUCK` is there, no sync returns: it waits in the kernel, for a pipe that nobody
writes to.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from rollout_dispatcher.cli.main import main


def _hanging(sync: Callable[[int], None]) -> Callable[[int], None]:
    def hang(handle: int) -> None:
        if Path(os.environ["STUCK"]).exists():
            os.read(os.pipe()[0], 1)
        sync(handle)

    return hang


if __name__ == "__main__":
    os.fsync, os.fdatasync = _hanging(os.fsync), _hanging(os.fdatasync)
    sys.exit(main())
