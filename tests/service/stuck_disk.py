"""`dispatcher serve`, whose disk hangs as one over the network may.

While the file `STUCK` is there, no sync returns: it waits in the kernel, for a pipe that nobody
writes to. If "broken" is written in it, each sync fails instead.
"""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

from rollout_dispatcher.cli.main import main


def _hanging(sync: Callable[[int], None]) -> Callable[[int], None]:
    def hang(handle: int) -> None:
        if (stuck := Path(os.environ["STUCK"])).exists():
            if stuck.read_text() == "broken":
                raise OSError(errno.EIO, "Input/output error")
            os.read(os.pipe()[0], 1)
        sync(handle)

    return hang


if __name__ == "__main__":
    setattr(os, "fsync", _hanging(os.fsync))  # noqa: B010  it takes more than a descriptor
    setattr(os, "fdatasync", _hanging(os.fdatasync))  # noqa: B010
    sys.exit(main())
