"""`python -m tests.chaos`: long runs under faults, then the planted bugs; writes the figures.

Most faults hit ranks that know nothing of torch, some a journal on a small disk, some ranks that
train under torchrun. Exit code 0 only if nothing was lost, duplicated, disputed or
starved, every run got to its end, and every planted bug was caught.
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

from tests.chaos.cluster.processes import mount
from tests.chaos.faults.campaign import DISK_FAULTS, FAULTS, TORCHRUN_FAULTS, deck, fill_disk
from tests.chaos.planted.selftest import TRIALS, is_caught
from tests.chaos.run import Recovery, Result, run
from tests.chaos.settings import LARGE_BUFFER, Settings
from tests.chaos.verdict.check import Verdict

#: One fault of so many is for a journal on a small disk.
SHARE_ON_SMALL_DISK = 10


def main() -> int:
    """Run it all; the exit code."""
    options = _options()
    # A terminated run ends what it started, as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    random = Random(options.seed)
    on_small = options.faults // SHARE_ON_SMALL_DISK
    may_mount = _may_mount(folder, on_small)
    runs = [
        ("run", FAULTS, options.faults - on_small - options.torchrun, Settings()),
        (
            "small-disk", DISK_FAULTS, on_small if may_mount else 0,
            Settings(small_disk=True, buffer_samples=LARGE_BUFFER),
        ),
        ("torchrun", TORCHRUN_FAULTS, options.torchrun, Settings(dp_size=2, torchrun=True)),
    ]  # fmt: skip
    results = [
        run(folder / name, settings, list(islice(deck(faults, random), count)), random, _say)
        for name, faults, count, settings in runs
        if count
    ]
    caught = [bug for bug in TRIALS if _try(bug, folder / bug, options.seed)]
    found = figures(results, caught) | {"skipped": 0 if may_mount else on_small}
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
    kinds = sorted({one.fault for one in recoveries})
    verdicts = [result.verdict for result in results]
    return {
        "faults": len(recoveries),
        "lost": sum(len(one.lost) for one in verdicts),
        "duplicated": sum(len(one.duplicated) for one in verdicts),
        "disagreements": sum(len(one.disagreements) for one in verdicts),
        "starved": sum(len(one.starved) for one in verdicts),
        "planted": len(TRIALS),
        "caught": len(caught),
        "recovery_seconds": _quantiles([one.seconds for one in recoveries]),
        "recovery_seconds_without_the_fault_itself": _quantiles(
            [one.seconds - one.fault_seconds for one in recoveries]
        ),
        "by_fault": {kind: _by_fault(kind, recoveries) for kind in kinds},
        "disk_full": {
            "faults": sum(one.fault == fill_disk.__name__ for one in recoveries),
            "refused_and_recovered": sum(result.times_full for result in results),
        },
        "under_torchrun": sum("torchrun" in one.fault for one in recoveries),
        "acknowledged": sum(result.acknowledged for result in results),
        "committed": sum(len(one.committed) for one in verdicts),
        "steps": sum(result.steps for result in results),
        "stalled": [result.stalled for result in results if result.stalled is not None],
    }


def _by_fault(kind: str, recoveries: Sequence[Recovery]) -> dict[str, object]:
    found = [one for one in recoveries if one.fault == kind]
    after = _quantiles([one.seconds - one.fault_seconds for one in found])
    return _quantiles([one.seconds for one in found]) | {"without_the_fault_itself": after}


def _quantiles(seconds: list[float]) -> dict[str, object]:
    ordered = sorted(seconds)
    shares = {"p50": 0.5, "p99": 0.99} if ordered else {}
    return {"count": len(ordered)} | {
        name: round(ordered[max(ceil(share * len(ordered)) - 1, 0)], 3)
        for name, share in shares.items()
    }


def _may_mount(folder: Path, faults: int) -> bool:
    """Whether a small file system can be mounted; says how many faults are skipped if not."""
    place = folder / "probe"
    place.mkdir()
    try:
        mount(place)
    except (OSError, subprocess.CalledProcessError) as error:
        _say(f"SKIPPED: {faults} faults of a full disk, as nothing small can be mounted ({error})")
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
    parser.add_argument("--torchrun", type=int, default=12, help="of them under torchrun (12)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults (1)")
    parser.add_argument("--out", type=Path, default=Path("build/chaos.json"), help="figures, JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
