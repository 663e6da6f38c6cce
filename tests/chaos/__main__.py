"""`python -m tests.chaos`: long runs under faults, then the planted bugs; writes the figures.

Most faults hit ranks that know nothing of torch, some ranks that go back to checkpoints, some a
journal on a small disk, some ranks that train under torchrun. Exit code 0 only if no promise was
broken, every run got to its end, and every planted bug was caught with every one of its seeds.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import islice
from math import ceil
from pathlib import Path
from random import Random

from tests.chaos.cluster.processes import mount
from tests.chaos.faults.campaign import (
    DISK_FAULTS,
    FAULTS,
    REWINDS,
    TORCHRUN_FAULTS,
    deck,
    fill_disk,
)
from tests.chaos.planted.selftest import TRIALS, is_caught
from tests.chaos.run import Recovery, Result, run
from tests.chaos.settings import LARGE_BUFFER, Settings
from tests.chaos.verdict.check import KINDS, Verdict

#: One fault of so many is for a journal on a small disk, and one for ranks that save checkpoints.
SHARE_ON_SMALL_DISK, SHARE_OF_REWINDS = 10, 5
#: Each planted bug has to be caught so many times, each with another seed.
SEEDS = 3


def main() -> int:
    """Run it all; the exit code."""
    options = _options()
    # A terminated run ends what it started, as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    random = Random(options.seed)
    on_small = options.faults // SHARE_ON_SMALL_DISK
    rewinds = options.faults // SHARE_OF_REWINDS
    may_mount = _may_mount(folder, on_small)
    runs = [
        ("run", FAULTS, options.faults - on_small - rewinds - options.torchrun, Settings()),
        ("rewinds", REWINDS, rewinds, Settings(dp_size=2, retain=True)),
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
    seeds = range(options.seed, options.seed + SEEDS)
    caught = {bug: [_try(bug, folder / bug, seed) for seed in seeds] for bug in TRIALS}
    found = {
        "seed": options.seed,
        "faults_asked": options.faults,
        "skipped": 0 if may_mount else on_small,
    } | figures(results, caught)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=2) + "\n")
    for result in results:
        _summarise(result.verdict)
    _say(json.dumps(found))
    clean = all(map(all, caught.values())) and all(
        result.verdict.clean and result.stalled is None for result in results
    )
    if clean:
        shutil.rmtree(folder)
    else:
        _say(f"histories and logs are in {folder}")
    return 0 if clean else 1


def figures(results: Sequence[Result], caught: Mapping[str, Sequence[bool]]) -> dict[str, object]:
    """What is written to the file; caught: of each planted bug, with one seed after the other."""
    recoveries = [item for result in results for item in result.recoveries]
    kinds = sorted({one.fault for one in recoveries})
    verdicts = [result.verdict for result in results]
    return {
        "faults": len(recoveries),
        **{kind: sum(len(getattr(one, kind)) for one in verdicts) for kind in KINDS},
        "planted": len(TRIALS),
        "seeds_of_each": SEEDS,
        "caught": sum(map(all, caught.values())),
        "caught_by_seed": {bug: sum(found) for bug, found in caught.items()},
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
        "steps_rewound": sum(result.steps_rewound for result in results),
        "dp_sizes": sorted({size for result in results for size in result.sizes}),
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
    found = is_caught(bug, folder / str(seed), seed)
    _say(f"planted bug {bug}, seed {seed}: {'caught' if found else 'NOT CAUGHT'}")
    return found


def _summarise(verdict: Verdict) -> None:
    for kind in KINDS:
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
