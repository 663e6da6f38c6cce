"""The rows of the report: what was measured, beside what, and every run's figure.

Rows are kept as a JSON list of `{"name", "value", "unit", "against", "ratio", "runs"}`. `value` is
the median of `runs`; `ratio` is `value` over that of the row named in `against`, where there is
one.
"""

import json
from collections.abc import Iterable, Sequence
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


def row(name: str, unit: str, runs: Sequence[float], against: Row | None = None) -> Row:
    """A row of the median of some runs."""
    value = median(runs)
    ratio = value / against.value if against else None
    return Row(name, value, unit, against.name if against else None, ratio, list(runs))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all values do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


def write(path: Path, rows: Iterable[Row]) -> None:
    """Keep rows as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(item) for item in rows], indent=2) + "\n")
