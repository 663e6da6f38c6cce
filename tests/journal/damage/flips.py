"""Flips bits in a journal's index and uses what is left of it.

    python -m tests.journal.damage.flips COUNT SEED

Each journal with flipped bits either is refused with a JournalError, or says exactly what the
intact one does, and can be written to, closed and opened again. Anything else ends this process.
"""

import json
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from rollout_dispatcher.core.facts import Fact
from rollout_dispatcher.errors import JournalError
from tests.journal.player import Player
from tests.journal.support import open_journal, opened, plain

HORIZON = 2000


@dataclass
class Victim:
    """A closed journal of several snapshots; end: bytes of its index that have records."""

    directory: Path
    end: int
    remembered: dict[str, object]
    following: list[tuple[list[Fact], dict[str, object]]]
    remembered_then: dict[str, object]

    @classmethod
    def make(cls, folder: Path) -> "Victim":
        player = Player(Random(5), HORIZON)
        for _ in range(3):
            with opened(folder / "intact", id_horizon=HORIZON) as (journal, listener, _):
                for _ in range(900):
                    lsn = journal.append(*player.batch())
                listener.wait(lsn)
            end = journal._store._index._records._end
        remembered = plain(player.model.remembered())
        following = [player.batch() for _ in range(60)]
        return cls(folder / "intact", end, remembered, following, plain(player.model.remembered()))


def main(count: int, seed: int) -> None:
    outcomes: Counter[str] = Counter()
    with TemporaryDirectory() as scratch:
        victim = Victim.make(Path(scratch))
        for number in range(count):
            directory = Path(scratch) / "damaged"
            shutil.copytree(victim.directory, directory)
            flip(directory / "index", victim.end, Random(f"{seed}/{number}"))
            outcomes[outcome(victim, directory)] += 1
            shutil.rmtree(directory)
    print(json.dumps(outcomes))


def flip(path: Path, end: int, random: Random) -> None:
    """Change some bits: as a rule one, often in the last records or the first."""
    with path.open("r+b") as file:
        for _ in range(random.choice([1, 1, 1, 2, 8])):
            last = end - 1 - random.randrange(min(end, 4096))
            at = random.choice([random.randrange(64), last, random.randrange(end)])
            file.seek(at)
            (byte,) = file.read(1) or b"\0"
            file.seek(at)
            file.write(bytes([byte ^ 1 << random.randrange(8)]))


def outcome(victim: Victim, directory: Path) -> str:
    """What came of it; anything but these raises."""
    try:
        journal, found = open_journal(directory, id_horizon=HORIZON)
    except JournalError as error:
        return type(error).__name__
    assert plain(found) == victim.remembered
    for facts, totals in victim.following:
        journal.append(facts, totals)
    assert journal.close(), journal.failure
    journal, found = open_journal(directory, id_horizon=HORIZON)
    assert plain(found) == victim.remembered_then
    assert journal.close()
    return "unharmed"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
