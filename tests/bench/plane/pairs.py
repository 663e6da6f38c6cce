"""Two whole planes alive at once, run in turn: whatever else the machine does falls on both.

Each is first in every other pair. Compared is the CPU time of each process, and of all together.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

from tests.bench.plane.children.children import Child, all_of

WHOLE = Path(__file__).parent / "children" / "whole.py"
#: CPU seconds of one run by process, and of all together; or one plane's over the other's.
Seconds = dict[str, float]


@contextmanager
def ready(*planes: Child) -> Iterator[None]:
    """Have planes (`children.whole`) come up, and end them when done."""
    with all_of(*planes):
        for child in planes:
            child.hear()
        yield
        for child in planes:
            child.ask(do="end")


def ratios(before: Child, after: Child, pairs: int) -> Iterator[Seconds]:
    """The second's seconds over the first's, of each pair of runs."""
    for pair in range(pairs):
        order = (before, after) if pair % 2 == 0 else (after, before)
        seconds = {child: _run(child) for child in order}
        yield {name: spent / seconds[before][name] for name, spent in seconds[after].items()}


def spreads(found: Sequence[Seconds]) -> Mapping[str, dict[str, float]]:
    """By process: the median of the pairs, and their quartiles."""
    columns = {name: [pair[name] for pair in found] for name in found[0]}
    quartiles = {name: quantiles(each, n=4) for name, each in columns.items()}
    return {
        name: {"ratio": median(each), "low": quartiles[name][0], "high": quartiles[name][2]}
        for name, each in columns.items()
    }


def _run(child: Child) -> Seconds:
    found = child.ask(do="run")
    return {"all": sum(found.values()), **found}
