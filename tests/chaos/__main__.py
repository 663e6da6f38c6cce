"""`python -m tests.chaos`: one long run under faults, then the planted bugs; writes the figures.

Exit code 0 only if nothing was lost, duplicated, disputed or starved, the run got to its end, and
every planted bug was caught.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import islice
from math import ceil
from pathlib import Path
from random import Random

from tests.chaos.check import Verdict
from tests.chaos.cluster import Settings
from tests.chaos.faults import DISK_FAULTS, FAULTS, deck
from tests.chaos.processes import mount
from tests.chaos.run import Result, run
from tests.chaos.selftest import TRIALS, is_caught

#: One fault of so many is for a journal on a small disk.
SHARE_ON_SMALL_DISK = 10
#: Samples; more than fit into the segments that the journal has at hand.
LARGE_BUFFER = 600


def main() -> int:
    """Run it all; the exit code."""
    options = _options()
    # A terminated run ends what it started, as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    random = Random(options.seed)
    on_small = options.faults // SHARE_ON_SMALL_DISK if _may_mount(folder) else 0
    faults = list(islice(deck(FAULTS, random), options.faults - on_small))
    results = [run(folder / "run", Settings(), faults, random, _say)]
    if on_small:
        faults = list(islice(deck(DISK_FAULTS, random), on_small))
        settings = Settings(small_disk=True, buffer_samples=LARGE_BUFFER)
        results.append(run(folder / "small-disk", settings, faults, random, _say))
    caught = [bug for bug in TRIALS if _try(bug, folder / bug, options.seed)]
    found = figures(results, caught)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=2) + "\n")
    for result in results:
        _summarise(result.verdict)
    _say(json.dumps(found))
    clean = len(caught) == len(TRIALS) and all(
        result.verdict.clean and result.stalled is None for result in results
    )
    if clean:
        shutil.rmtree(folder)
    else:
        _say(f"histories and logs are in {folder}")
    return 0 if clean else 1


def figures(results: Sequence[Result], caught: Sequence[str]) -> dict[str, object]:
    """What is written to the file."""
    recoveries = [item for result in results for item in result.recoveries]
    kinds = sorted({name for name, _ in recoveries})
    verdicts = [result.verdict for result in results]
    return {
        "faults": len(recoveries),
        "lost": sum(len(one.lost) for one in verdicts),
        "duplicated": sum(len(one.duplicated) for one in verdicts),
        "disagreements": sum(len(one.disagreements) for one in verdicts),
        "starved": sum(len(one.starved) for one in verdicts),
        "planted": len(TRIALS),
        "caught": len(caught),
        "recovery_seconds": _quantiles([seconds for _, seconds in recoveries]),
        "by_fault": {
            kind: _quantiles([seconds for name, seconds in recoveries if name == kind])
            for kind in kinds
        },
        "acknowledged": sum(result.acknowledged for result in results),
        "committed": sum(len(one.committed) for one in verdicts),
        "steps": sum(result.steps for result in results),
        "stalled": [result.stalled for result in results if result.stalled is not None],
    }


def _quantiles(seconds: list[float]) -> dict[str, float | int]:
    ordered = sorted(seconds)
    shares = {"p50": 0.5, "p99": 0.99} if ordered else {}
    return {"count": len(ordered)} | {
        name: round(ordered[max(ceil(share * len(ordered)) - 1, 0)], 3)
        for name, share in shares.items()
    }


def _may_mount(folder: Path) -> bool:
    place = folder / "probe"
    place.mkdir()
    try:
        mount(place)
    except (OSError, subprocess.CalledProcessError) as error:
        _say(f"SKIPPED: faults of a full disk, as no small file system can be mounted ({error})")
        return False
    subprocess.run(["umount", place], check=True)
    return True


def _try(bug: str, folder: Path, seed: int) -> bool:
    found = is_caught(bug, folder, seed)
    _say(f"planted bug {bug}: {'caught' if found else 'NOT CAUGHT'}")
    return found


def _summarise(verdict: Verdict) -> None:
    for kind in ("lost", "duplicated", "disagreements", "starved"):
        for text in getattr(verdict, kind)[:10]:
            _say(f"{kind}: {text}")


def _say(text: str) -> None:
    print(text, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=200, help="faults in the run (200)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults (1)")
    parser.add_argument("--out", type=Path, default=Path("build/chaos.json"), help="figures, JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
