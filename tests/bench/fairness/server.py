"""A dispatcher that writes down by itself how long one producer's messages waited.

    python -m tests.bench.fairness.server serve ...

The metric is of all producers together. Here the same times, by the same clock, are kept apart for
the producer `quiet`, in seconds, a line each, in the file that the environment names.
"""

import asyncio
import os
import sys
from pathlib import Path

from rollout_dispatcher.cli.main import main
from rollout_dispatcher.service.connections.peer import Peer
from rollout_dispatcher.service.router import Router

QUIET = "quiet"
FILE = "QUIET_TIMES"


def watch() -> None:
    """Write the quiet producer's times down as they are observed."""
    answered, path = Router._answered, Path(os.environ[FILE])

    def answered_and_written(self: Router, peer: Peer, since: float | None) -> None:
        if peer.client_id == QUIET and since is not None:
            with path.open("a") as out:
                print(asyncio.get_running_loop().time() - since, file=out)
        answered(self, peer, since)

    Router._answered = answered_and_written  # type: ignore[method-assign]


if __name__ == "__main__":
    watch()
    sys.exit(main(sys.argv[1:]))
