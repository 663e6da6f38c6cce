"""Two whole planes alive at once, run in turn (`tests.bench.pairs`).

Compared is the CPU time of each process, and of all together.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.bench.pairs import Spread, in_turn, spread
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
    for one, other in in_turn(before, after, lambda child, _: _run(child), pairs):
        yield {name: spent / one[name] for name, spent in other.items()}


def spreads(found: Sequence[Seconds]) -> Mapping[str, Spread]:
    """By process."""
    return {name: spread([pair[name] for pair in found]) for name in found[0]}


def _run(child: Child) -> Seconds:
    found = child.ask(do="run")
    return {"all": sum(found.values()), **found}
