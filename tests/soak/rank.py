"""The DP ranks of a soak, in one process: take every step, look at its bytes, wait, commit.

    python -m tests.soak.rank ENDPOINT DP_SIZE SECONDS

SECONDS is what a step takes at least, so that producers are faster than ranks.
"""

import sys
import threading

from rollout_workers.demo.data import leave_with_starter
from rollout_workers.rank.client import RankClient


def train(client: RankClient, seconds: float) -> None:
    """Take and commit steps until the process is killed."""
    pause = threading.Event()
    while (step := client.next_step()) is not None:
        for one in step:
            assert len(one.header.tokens) > 0
        pause.wait(seconds)
        step.commit()


def main(endpoint: str, dp_size: int, seconds: float) -> None:
    """One thread a rank."""
    leave_with_starter()
    first = RankClient(endpoint, dp_rank=0, dp_size=dp_size)
    others = [
        RankClient(endpoint, dp_rank=rank, dp_size=dp_size, generation=first.generation)
        for rank in range(1, dp_size)
    ]
    threads = [
        threading.Thread(target=train, args=(client, seconds)) for client in (first, *others)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
