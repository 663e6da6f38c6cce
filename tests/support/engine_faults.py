"""One fault of each kind on real processes whose payloads lie in an engine."""

from pathlib import Path
from random import Random

from tests.chaos.faults.decks import ENGINES, FAULTS
from tests.chaos.run import run
from tests.chaos.settings import Settings

SEED = 7
#: Faults in which what has the objects is killed.
KILLS = 4


def survives(engine: str, folder: Path) -> None:
    """Assert that faults of references break no promise, and leave nothing in the engine."""
    names = [name for name in ENGINES if name not in FAULTS]
    assert len([name for name in names if name.startswith("kill_store")]) == KILLS
    settings = Settings(dp_size=2, references=True, engine=engine)
    result = run(folder / "run", settings, names, Random(SEED))
    assert result.stalled is None, result.stalled
    assert result.verdict.clean, result.verdict
    assert len(result.recoveries) == len(names)
    assert result.unresolved > 0
    assert result.released > 0
