"""`python -m tests.soak`: 1,000,000 samples without a journal, and as many with; the figures.

Exit code 0 only if the dispatcher's resident memory stayed within 5 % each time, its books
balanced at every look, and producers were held back most of the time.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.soak.soak import Load, Look, figures, soak

GROWTH = 0.05
BACKPRESSURE = 0.5


def main() -> int:
    """Run; the exit code."""
    options = _options()
    found: dict[str, Any] = {}
    for name, journal in (("without_journal", False), ("with_journal", True)):
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            looks = soak(Path(folder), Load(options.samples, journal), _progress(options.samples))
        found[name] = figures(looks)
        print(name, json.dumps(found[name]), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=2) + "\n")
    good = all(
        abs(one["resident"]["growth"]) <= GROWTH
        and one["balanced"]
        and one["backpressure_share"] >= BACKPRESSURE
        for one in found.values()
    )
    return 0 if good else 1


class _progress:  # noqa: N801 - used as a function
    """Prints ten lines a run."""

    def __init__(self, samples: int) -> None:
        self._every = self._next = samples // 10

    def __call__(self, look: Look) -> None:
        if look.committed >= self._next:
            self._next += self._every
            print(
                f"{look.committed} samples after {look.seconds:.0f} s: "
                f"{look.resident / 1e6:.1f} MB resident, {look.anonymous / 1e6:.1f} anonymous",
                flush=True,
            )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000, help="each time (1000000)")
    parser.add_argument("--out", type=Path, default=Path("build/soak.json"), help="figures, JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
