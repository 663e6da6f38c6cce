"""`dispatcher serve` on a disk that takes a second to sync, once there is a file `slow` beside the
journal's directory.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rollout_dispatcher.cli.main import main


def _slow(sync: Callable[[int], None], flag: Path) -> Callable[[int], None]:
    def wait(handle: int) -> None:
        sync(handle)
        if flag.exists():
            time.sleep(1.0)

    return wait


if __name__ == "__main__":
    beside = Path(sys.argv[sys.argv.index("--journal-dir") + 1]).with_name("slow")
    setattr(os, "fsync", _slow(os.fsync, beside))  # noqa: B010  it takes more than a descriptor
    setattr(os, "fdatasync", _slow(os.fdatasync, beside))  # noqa: B010
    sys.exit(main())
