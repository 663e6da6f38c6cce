"""What several faults do: a process is stopped for a while."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from tests.chaos.cluster.cluster import Cluster
from tests.chaos.cluster.processes import Killable


@contextmanager
def paused(cluster: Cluster, process: Killable) -> Iterator[None]:
    """Stopped for the block's time."""
    cluster.disturb()
    process.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.signal(signal.SIGCONT)
