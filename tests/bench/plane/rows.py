"""The rows of the report: what was measured, beside what, and every run's figure.

Rows are kept as a JSON list of `{"name", "value", "unit", "against", "ratio", "runs"}`. `runs` has
one figure a run and `value` is their median; of a percentile it is that of all runs together, as a
run alone is too short for one. `ratio` is `value` over that of the row named in `against`.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median


@dataclass(frozen=True, slots=True)
class Row:
    """One figure."""

    name: str
    value: float
    unit: str
    against: str | None
    ratio: float | None
    runs: list[float]

    def __str__(self) -> str:
        spread = f"({min(self.runs):.4g} to {max(self.runs):.4g}, {len(self.runs)} runs)"
        beside = "" if self.ratio is None else f"  {self.ratio:.3g} of {self.against}"
        return f"{self.name:26} {self.value:10.4g} {self.unit:10} {spread:36}{beside}"


def row(
    name: str,
    unit: str,
    runs: Sequence[float],
    against: Row | None = None,
    value: float | None = None,
) -> Row:
    """A row of some runs; its value is their median unless given."""
    value = median(runs) if value is None else value
    ratio = value / against.value if against else None
    return Row(name, value, unit, against.name if against else None, ratio, list(runs))


def latency_rows(
    name: str, runs: Sequence[Sequence[float]], against: Sequence[Row] = ()
) -> Iterator[Row]:
    """Two rows of a name, the 50th and the 99th percentile of seconds, in milliseconds."""
    for at, percent in enumerate((50, 99)):
        each = [1e3 * percentile(run, percent) for run in runs]
        everything = 1e3 * percentile([seconds for run in runs for seconds in run], percent)
        beside = against[at] if against else None
        yield row(name, f"ms p{percent}", each, beside, everything)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all values do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


def write(path: Path, rows: Iterable[Row]) -> None:
    """Keep rows as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(item) for item in rows], indent=2) + "\n")
