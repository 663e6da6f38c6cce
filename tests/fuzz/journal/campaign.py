"""Journals whose files were damaged, opened and used.

    python -m tests.fuzz.journal.campaign COUNT SEED [BUG]

Each either is refused with a JournalError, and then not a byte of it has changed, or remembers what
it was given: all of it, or, where the end of what was not synced is damaged, all up to there. No
payload that it hands out is another than was pushed. Anything else ends this process, with a
traceback or, where memory that is mapped has gone, without one.
"""

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from rollout_dispatcher.core.facts import Fact, RecoveredState
from rollout_dispatcher.errors import JournalError
from rollout_dispatcher.journal.journal import Journal
from tests.fuzz.journal.mutations import mutate
from tests.fuzz.planted import IN_JOURNAL
from tests.journal.player import Player
from tests.journal.support import accepted, as_if_killed, open_journal, opened, plain, plain_entry
from tests.support.source import ROOT

HORIZON = 500
LIVES, BATCHES, UNSYNCED = 3, 120, 25
#: How many values `plain_entry` has, and which is the payload.
ENTRY_VALUES, PAYLOAD = len(plain_entry(accepted(0).entry)), 8


@dataclass
class Victim:
    """A journal's files as some process left them.

    may_be: what they may say, the least of it first: all that was synced, and what came after.
    payloads: by ticket, of every sample that lives in any of these.
    """

    directory: Path
    may_be: list[dict[str, object]]
    payloads: dict[int, bytes]
    following: list[tuple[list[Fact], dict[str, object]]]

    @classmethod
    def make(cls, folder: Path, *, killed: bool) -> "Victim":
        """`killed`: its last batches were written, and not synced; else it was closed."""
        player = Player(Random(5), HORIZON)
        directory, older = folder / "journal", folder / "older"
        for life in range(LIVES):
            with opened(directory, id_horizon=HORIZON) as (journal, listener, _):
                for _ in range(BATCHES):
                    listener.wait(journal.append(*player.batch()))
                if life == LIVES - 2:
                    shutil.copytree(directory, older, dirs_exist_ok=True)
                journal._store.sync()
                may_be, payloads = [player.model.plain()], player.model.payloads()
                for _ in range(UNSYNCED if killed else 0):
                    listener.wait(journal.append(*player.batch()))
                    may_be.append(player.model.plain())
                    payloads |= player.model.payloads()
                left = as_if_killed(directory, folder / f"left-{life}")
        left = left if killed else directory
        (left / "older").mkdir()
        for name in ("index", "newest"):
            shutil.copyfile(older / name, left / "older" / name)
        return cls(left, may_be, payloads, [player.batch() for _ in range(20)])


def main(count: int, seed: int, bug: str = "none") -> None:
    """Print how often what came of it."""
    if bug != "none":
        IN_JOURNAL[bug](setattr)
    outcomes: Counter[str] = Counter()
    with TemporaryDirectory() as scratch:
        victims = []
        for killed in (False, True):
            folder = Path(scratch) / f"victim-{killed}"
            folder.mkdir()
            victims.append(Victim.make(folder, killed=killed))
        for number in range(count):
            directory = Path(scratch) / "damaged"
            victim = victims[number % len(victims)]
            shutil.copytree(victim.directory, directory)
            done = mutate(directory, Random(f"{seed}/{number}"))
            shutil.rmtree(directory / "older")
            try:
                outcomes[_outcome(victim, directory)] += 1
            except Exception as error:
                error.add_note(f"input {number} of seed {seed}: {done}")
                raise
            shutil.rmtree(directory)
    print(json.dumps(outcomes))


def _outcome(victim: Victim, directory: Path) -> str:
    """What came of it; anything but these raises."""
    before = _content(directory)
    try:
        journal, found = open_journal(directory, id_horizon=HORIZON)
    except JournalError as error:
        _check_same(before, _content(directory), error)
        return type(error).__name__
    lost = _check_payloads(victim, journal, found)
    shown = _without(lost, plain(found))
    may_be = [_without(lost, each) for each in victim.may_be]
    assert shown in may_be, "it remembers something else"
    if shown != may_be[-1]:
        assert journal.close()
        return "shorter"
    try:
        for facts, totals in victim.following:
            journal.append(facts, totals)
    finally:
        closed = journal.close()
    assert closed, journal.failure
    return "unharmed"


def _check_same(before: dict[str, bytes], after: dict[str, bytes], error: JournalError) -> None:
    """But for an index where there was none."""
    changed = sorted(name for name in before if before[name] != after.get(name))
    assert not changed, f"refused ({error}), and changed: {changed}"


def _without(lost: set[int], value: Any) -> Any:
    """What is remembered, or part of it, without the payloads of these tickets: see plain_entry."""
    if isinstance(value, dict):
        return {key: _without(lost, each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        if len(value) == ENTRY_VALUES and value[0] in lost:
            return (*value[:PAYLOAD], None, *value[PAYLOAD + 1 :])
        return type(value)(_without(lost, each) for each in value)
    return value


def _check_payloads(victim: Victim, journal: Journal, found: RecoveredState) -> set[int]:
    """Every payload is what was pushed, or cannot be read: returns the tickets of these."""
    lost = set()
    entries = list(found.entries)
    for step in (*found.steps, *found.retained):
        entries += [entry for rank in step.micro_batches for part in rank for entry in part]
    for entry in entries:
        try:
            payload = journal.fetch(entry.ticket)
        except JournalError:
            lost.add(entry.ticket)
            continue
        assert payload == victim.payloads[entry.ticket], "another payload than was pushed"
    return lost


def _content(directory: Path) -> dict[str, bytes]:
    """What counts of its files: spares have no content, and the index gets its room back."""
    names = [*directory.glob("*.segment"), directory / "newest", directory / "index"]
    return {
        path.name: blake2b(path.read_bytes().rstrip(b"\0")).digest()
        for path in names
        if path.exists()
    }


def fuzz_journal(examples: int, number: int, bug: str = "none") -> dict[str, Any]:
    """So many damaged journals, in a process of its own; raises what they show."""
    command = [sys.executable, "-m", "tests.fuzz.journal.campaign", str(examples), str(number), bug]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, text=True)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-3000:]}"
    return {"inputs": examples, "outcomes": json.loads(done.stdout)}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
