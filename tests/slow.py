"""Which tests `make test` leaves to `make test-all`: those that take more than four seconds each.

    .venv/bin/pytest --durations=0 --durations-min=0.3 > LOG
    python -m tests.slow LOG [LOG ...]

writes slow.txt anew from what pytest says of a whole run (or of two: what is marked `alone`, and
what is not). Tests that it names and that are not in the logs any more are left out.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

LISTED = Path(__file__).with_name("slow.txt")
LIMIT_S = 4.0
#: The only tests that find a planted bug (`make mutants`), which stay however long they take.
KEPT = {"tests/workers/normalisers/test_gradients.py::test_a_gradient_is_that_of_the_formula"}
TOOK = re.compile(r"^(?P<seconds>[0-9.]+)s (?:setup|call|teardown) +(?P<test>\S+::\S+)")


def function_of(test: str) -> str:
    """A test's id without its parameters: all cases of a function go together."""
    return test.partition("[")[0]


def listed() -> frozenset[str]:
    """The tests that are left to `make test-all`, as pytest names them."""
    return frozenset(LISTED.read_text().splitlines())


def longest(lines: list[str]) -> list[str]:
    """The functions that take more than `LIMIT_S` over all of their cases, sorted."""
    took: dict[str, float] = defaultdict(float)
    for line in lines:
        if found := TOOK.match(line):
            took[function_of(found["test"])] += float(found["seconds"])
    return sorted(test for test, seconds in took.items() if seconds > LIMIT_S and test not in KEPT)


def main() -> None:
    """Write the list."""
    lines = [line for log in sys.argv[1:] for line in Path(log).read_text().splitlines()]
    LISTED.write_text("".join(f"{test}\n" for test in longest(lines)))


if __name__ == "__main__":
    main()
