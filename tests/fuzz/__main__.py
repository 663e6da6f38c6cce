"""`python -m tests.fuzz`: 100,000 inputs, most for the sessions alone; says what was tried.

Exit code 0 if nothing was found; otherwise the input that showed it is printed.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from tests.fuzz.campaign import (
    fuzz_about_stores,
    fuzz_as_ranks,
    fuzz_beside_work,
    fuzz_client_sessions,
    fuzz_session,
)
from tests.fuzz.http.attack import fuzz_http
from tests.fuzz.order.campaign import fuzz_order

#: Shares of the inputs; the rest goes to the dispatcher's session, which takes least time.
SHARES = {
    "client sessions": 0.1,
    "beside work": 0.1,
    "about stores": 0.05,
    "over HTTP": 0.05,
    "as ranks": 0.05,
    "order of words": 0.02,
}


def main() -> int:
    """Run all campaigns; the exit code."""
    options = _options()
    seed = options.seed
    number = {title: int(options.inputs * share) for title, share in SHARES.items()}
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:

        def folder(part: str) -> Path:
            (Path(name) / part).mkdir()
            return Path(name) / part

        campaigns: dict[str, Callable[[int], dict[str, object]]] = {
            "session": lambda count: fuzz_session(count, seed),
            "client sessions": lambda count: fuzz_client_sessions(count, seed),
            "beside work": lambda count: fuzz_beside_work(folder("work"), count, seed),
            "about stores": lambda count: fuzz_about_stores(folder("stores"), count, seed),
            "over HTTP": lambda count: fuzz_http(folder("http"), count, seed),
            "as ranks": lambda count: fuzz_as_ranks(folder("ranks"), count, seed),
            "order of words": lambda count: fuzz_order(count, seed, shorten=True),
        }
        for title, campaign in campaigns.items():
            began = monotonic()
            found = campaign(number.get(title, options.inputs - sum(number.values())))
            print(f"{title}: {json.dumps(found)} in {monotonic() - began:.0f} s", flush=True)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="in all (100000)")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (1)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
