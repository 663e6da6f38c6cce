"""A process that journals as fast as it can and says what is durable, until it is killed.

    python -m tests.journal.damage.victim DIRECTORY SYNC SEED

It first plays its seed forward to where the journal stands and compares, so that each life goes on
where the one before was cut off; it exits with 3 if they differ.
"""

import os
import sys
from pathlib import Path
from random import Random

from rollout_dispatcher.journal.policy import parse_sync
from tests.journal.player import Player
from tests.journal.support import open_journal, plain


def tell(lsn: int) -> None:
    """In one write, so that a kill cannot cut the number."""
    os.write(1, f"{lsn}\n".encode())


def main(directory: str, sync: str, seed: str) -> int:
    journal, remembered = open_journal(Path(directory), parse_sync(sync))
    player = Player(Random(int(seed)))
    for _ in range(journal.statistics().durable_lsn):
        player.batch()
    if plain(remembered) != plain(player.model.remembered()) and remembered.next_ticket:
        return 3
    journal.on_durable = tell
    while not journal.broken:
        facts, totals = player.batch()
        journal.append(facts, totals)
        if journal.statistics().queued_batches > 50:
            os.sched_yield()
    return 4


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
