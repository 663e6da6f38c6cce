"""What each event costs the core, in a small state and in a large one of each kind.

    python -m tests.bench.messages [--sizes 100 10000] [--state NAME] [--event NAME] [--json FILE]

Microseconds of the core alone, the median of `REPEATS` such events one after the other, for every
state and event of tests/support/core/. What is shown is each event in the state in which
it costs most beside a small one of its kind, or every pair with --all.
"""

import argparse
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter

from tests.support.core.events import EVENTS
from tests.support.core.states import STATES
from tests.support.core.worlds import World

REPEATS = 31
#: States whose large size is another one: what is in them is never so many, or takes long to build.
LARGEST = {"ranks": 2048, "ranks_at_the_end": 2048, "held_for_an_end": 4096}

Row = dict[str, str | float]


def measure(world: World, event: str) -> float | None:
    """Microseconds of an event in that world; None if it cannot happen there."""
    seconds = []
    for at in range(REPEATS):
        if (happens := EVENTS[event](world, at)) is None:
            break
        began = perf_counter()
        happens()
        seconds.append(perf_counter() - began)
    return 1e6 * median(seconds) if seconds else None


def compare(state: str, small: int, large: int) -> Iterator[Row]:
    """Each event in a small and a large world of that kind."""
    worlds = [STATES[state](size) for size in (small, min(large, LARGEST.get(state, large)))]
    gc.collect()
    gc.disable()
    for event in EVENTS:
        before, after = (measure(world, event) for world in worlds)
        if before is not None and after is not None:
            ratio = after / before
            yield {"event": event, "state": state, "small": before, "large": after, "ratio": ratio}
    gc.enable()


def main() -> None:
    """Print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=int, nargs=2, default=(100, 10_000), metavar="N")
    parser.add_argument("--state", choices=STATES, action="append", help="only this one")
    parser.add_argument("--all", action="store_true", help="every pair, not each event's worst")
    parser.add_argument("--json", type=Path, help="also write every pair to this file")
    given = parser.parse_args()
    rows = [row for state in given.state or STATES for row in compare(state, *given.sizes)]
    rows.sort(key=lambda row: (str(row["event"]), -float(row["ratio"])))
    print(f"{'event':26} {'state':28} {'small':>8} {'large':>9} us {'ratio':>7}")
    shown = ""
    for row in rows:
        if given.all or row["event"] != shown:
            print(
                f"{row['event']:26} {row['state']:28} {row['small']:8.1f} {row['large']:9.1f}    "
                f"{row['ratio']:7.1f}"
            )
        shown = str(row["event"])
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
