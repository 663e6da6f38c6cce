"""Journals of today's format that are kept, with what each recovers to.

    python -m tests.journal.kept    writes them again, when the format rises

Half are of a process that was killed, the others were closed; every fact that there is is in one.
"""

import gzip
import io
import json
import tarfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from rollout_dispatcher.core import facts
from rollout_dispatcher.core.facts import (
    CostFitted,
    Fact,
    RecoveredState,
    SchemaFixed,
    SpeedsMeasured,
)
from rollout_dispatcher.journal.journal import Journal
from rollout_planner.cost import Quadratic
from tests.histories.names import call, held, read
from tests.journal.player import Player
from tests.journal.support import SCHEMAS, Listener, as_if_killed, open_journal

HERE = Path(__file__).parent / "kept"
#: Every second one is of a process that was killed, and has a few batches more.
JOURNALS, BATCHES, MORE = range(4), 24, 6
TRIED = 400
#: What players do not play.
SETTLED = [
    SchemaFixed(SCHEMAS[0], "the first push"),
    CostFitted(1, Quadratic(0.5, 3.0, 2.0, 1.0), 0.125, 3),
    SpeedsMeasured(1, (1.0, 1.25), 3),
]
EXPECTED = HERE / "recovered.json"


def recovers(folder: Path) -> dict[str, Any]:
    """What a process is told that opens this journal, payloads among it."""
    journal, remembered = open_journal(folder)
    try:
        found = read("recovered", remembered)
        found["samples"] = [_sample(journal, entry) for entry in _entries(remembered)]
        return {name: found[name] for name in sorted(found)}
    finally:
        journal.close()


def _entries(remembered: RecoveredState) -> Iterator[Any]:
    yield from held("recovered buffered", remembered)
    for name in ("recovered steps", "recovered retained"):
        for step in held(name, remembered):
            for rank in held("micro-batches", step):
                for part in rank:
                    yield from part


def _sample(journal: Journal, entry: Any) -> dict[str, Any]:
    """A sample as it was accepted; its bytes by a digest, if the journal has them."""
    found = read("recovered sample", entry)
    if "stored in" not in found:
        data = call("fetch", journal, number=held("entry number", entry))
        found["bytes"] = sha256(data).hexdigest()[:16]
    return found


def unpack(number: int, to: Path) -> Path:
    """A journal as it was left."""
    with tarfile.open(HERE / f"{number}.tar.gz") as tar:
        tar.extractall(to, filter="data")
    return to / "journal"


def main() -> None:
    """Write the journals, and what they recover to."""
    HERE.mkdir(exist_ok=True)
    expected = {}
    for number, seed in enumerate(_seeds()):
        with TemporaryDirectory() as name:
            left = _written(Player(Random(seed)), Path(name), killed=number % 2 == 1)
            (HERE / f"{number}.tar.gz").write_bytes(_packed(left))
            expected[number] = recovers(left)
    lines = ",\n".join(f'"{number}": {json.dumps(found)}' for number, found in expected.items())
    EXPECTED.write_text(f"{{\n{lines}\n}}\n")


def _seeds() -> list[int]:
    """Seeds whose facts, together, are of every kind."""
    known = {kind for kind in vars(facts).values() if isinstance(kind, type)}
    missing = {kind for kind in known if issubclass(kind, Fact)} - {Fact, *map(type, SETTLED)}
    chosen = []
    for number in JOURNALS:
        batches = BATCHES + MORE * (number % 2)
        kinds = {seed: _kinds(Player(Random(seed)), batches) for seed in range(TRIED)}
        best = max(kinds, key=lambda seed: len(kinds[seed] & missing))
        missing -= kinds[best]
        chosen.append(best)
    names = [kind.__name__ for kind in missing]
    assert not missing, f"no journal has {names}: play them in tests/journal/player.py"
    return chosen


def _kinds(player: Player, batches: int) -> set[type[Fact]]:
    return {type(fact) for _ in range(batches) for fact in player.batch()[0]}


def _written(player: Player, folder: Path, *, killed: bool) -> Path:
    """A journal of what a player plays, as it is left."""
    path = folder / "journal"
    journal, _ = open_journal(path)
    for _ in range(BATCHES):
        journal.append(*player.batch())
    journal.append(SETTLED, player.model.totals)
    journal.close()
    if not killed:
        return path
    journal, _ = open_journal(path)
    listener = Listener(journal)
    for _ in range(MORE):
        lsn = journal.append(*player.batch())
    listener.wait(lsn)
    left = as_if_killed(path, folder / "killed")
    journal.close()
    return left


def _packed(folder: Path) -> bytes:
    tarred = io.BytesIO()
    with tarfile.open(fileobj=tarred, mode="w") as tar:
        for path in sorted(folder.rglob("*")):
            info = tar.gettarinfo(path, arcname=str(Path("journal") / path.relative_to(folder)))
            info.mtime = info.uid = info.gid = 0
            info.uname = info.gname = ""
            with path.open("rb") as file:
                tar.addfile(info, file if info.isfile() else None)
    return gzip.compress(tarred.getvalue(), mtime=0)


if __name__ == "__main__":
    main()
