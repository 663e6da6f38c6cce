"""`python -m tests.fuzz`: 100,000 inputs, most for the sessions alone; says what was tried.

Exit code 0 if nothing was found; otherwise the input that showed it is printed.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic

from tests.fuzz.campaign import (
    fuzz_as_ranks,
    fuzz_beside_work,
    fuzz_client_sessions,
    fuzz_session,
)

#: Shares of the inputs.
BESIDE_WORK, AS_RANKS, CLIENTS = 0.15, 0.05, 0.1


def main() -> int:
    """Run all four campaigns; the exit code."""
    options = _options()
    shares = (BESIDE_WORK, AS_RANKS, CLIENTS)
    beside, as_ranks, clients = (int(options.inputs * share) for share in shares)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folders = [Path(name) / part for part in ("work", "ranks")]
        for folder in folders:
            folder.mkdir()
        campaigns: dict[str, Callable[[], dict[str, object]]] = {
            "session": partial(
                fuzz_session, options.inputs - beside - as_ranks - clients, options.seed
            ),
            "client sessions": partial(fuzz_client_sessions, clients, options.seed),
            "beside work": partial(fuzz_beside_work, folders[0], beside, options.seed),
            "as ranks": partial(fuzz_as_ranks, folders[1], as_ranks, options.seed),
        }
        for title, campaign in campaigns.items():
            began = monotonic()
            found = campaign()
            print(f"{title}: {json.dumps(found)} in {monotonic() - began:.0f} s", flush=True)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="in all (100000)")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (1)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
