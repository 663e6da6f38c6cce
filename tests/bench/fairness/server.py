"""A dispatcher that writes down by itself how long one producer's messages waited.

    python -m tests.bench.fairness.server serve ...

The metric is of all producers together. Here the same times, by the same clock, are kept apart for
the producer `quiet`, in seconds, a line each, in the file that the environment names.
"""

import os
import sys
from pathlib import Path

from rollout_dispatcher.cli.main import main
from rollout_dispatcher.service.metrics.collectors import MessageTimes

QUIET = "quiet"
FILE = "QUIET_TIMES"


def watch() -> None:
    """Write the quiet producer's times down as they are observed."""
    observe, path = MessageTimes._observe, Path(os.environ[FILE])

    def observe_and_write(self: MessageTimes, now: float) -> None:
        found = [now - since for peer, since in self._answered if peer.client_id == QUIET]
        if found:
            with path.open("a") as out:
                print(*found, sep="\n", file=out)
        observe(self, now)

    MessageTimes._observe = observe_and_write  # type: ignore[method-assign]


if __name__ == "__main__":
    watch()
    sys.exit(main(sys.argv[1:]))
