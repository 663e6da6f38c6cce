"""Our planner beside other projects' planners: the same lengths, in one process.

    python -m tests.peers [--corner NAME ...] [--sources DIR] [--random 2000] [--json FILE]

`make bench-peers` unpacks those that the package index has. The others are read from clones of
theirs, if they are in `build/bench/sources`, or in another folder that `--sources` names: slime,
miles, AReaL, RL (NeMo-RL), SkyRL, OpenRLHF, prime-rl.
"""

import argparse
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.peers import random_cases, table, window
from tests.peers.corners import all_cases
from tests.peers.measure import measure
from tests.peers.ours import ours
from tests.peers.problem import Corner, Peer
from tests.peers.roster import SOURCES, all_peers, from_index

WINDOW = "window"
CORNERS = [*Corner, WINDOW]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--corner", nargs="*", choices=CORNERS, help="only these corners")
    parser.add_argument("--sources", type=Path, default=SOURCES, help="folder with clones")
    parser.add_argument("--random", type=int, default=2000, help="random cases a corner")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    given = parser.parse_args()
    corners = set(given.corner or CORNERS)
    peers = all_peers(given.sources)
    if not from_index():
        print(
            "no peer of the package index is in build/bench/peers; `make bench-peers` fetches them"
        )
    print("beside", ", ".join(f"{peer.name} {peer.version}".strip() for peer in peers), flush=True)
    began = time.monotonic()
    rows = table_rows(corners, peers)
    found = random_cases.measure_all(corners, ours(), peers, given.random)
    print(f"{time.monotonic() - began:.0f} s")
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        figures = {"peers": said(peers), "rows": rows, "random": found}
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


def table_rows(corners: set[str], peers: list[Peer]) -> list[dict[str, Any]]:
    """The rows of the corners that are asked for, printed as they come."""
    rows = []
    print(table.HEADING)
    for case in all_cases():
        if case.corner not in corners:
            continue
        if not case.available:
            print(f"{case.name} skipped: its trace is not here")
            continue
        rows.append(measure(case, ours(), peers))
        print(table.line(rows[-1]), flush=True)
    if WINDOW in corners:
        for row in window.rows():
            rows.append(row)
            print(table.line(row), flush=True)
    return rows


def said(peers: list[Peer]) -> list[dict[str, str]]:
    """Who was compared, in which version, when."""
    today = datetime.now(tz=UTC).date().isoformat()
    return [{"name": peer.name, "version": peer.version, "date": today} for peer in peers]


if __name__ == "__main__":
    main()
