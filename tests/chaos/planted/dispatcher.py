"""Starts a dispatcher with a small journal and, if asked, a planted bug that the checker must find.

    python -m tests.chaos.planted.dispatcher BUG|none JUMPS serve ...

JUMPS is the file by which its clock is told to jump (`clock`). What is changed is changed here
before `serve` begins: production code has no switch. The journal's segments are small so that a run
of minutes fills, empties and reuses many of them.
"""

import sys
from pathlib import Path

from rollout_dispatcher.cli.main import main
from rollout_dispatcher.journal.journal import Journal
from rollout_workers.demo.data import leave_with_starter
from tests.chaos.actors.clock import follow_jumps
from tests.chaos.planted.bugs import BUGS

SEGMENT_BYTES = 1 << 20
INDEX_BYTES = 32 << 20


def shrink_journal() -> None:
    """Use a small journal."""
    opening = Journal.open.__func__  # type: ignore[attr-defined]
    opening.__kwdefaults__ |= {"segment_bytes": SEGMENT_BYTES, "map_bytes": INDEX_BYTES}


if __name__ == "__main__":
    leave_with_starter()  # whatever becomes of the run, its dispatcher ends with it
    shrink_journal()
    if sys.argv[1] != "none":
        BUGS[sys.argv[1]]()
    follow_jumps(Path(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
