"""`python -m tests.chaos`: long runs under faults, then the planted bugs; writes the figures.

Most faults hit ranks that know nothing of torch, some ranks that go back to checkpoints, some a
journal on a small disk, some ranks that train under torchrun, some payloads by reference. Exit code
0 only if no promise was broken, every run got to its end, and every planted bug was caught with
every one of its seeds.
"""

import argparse
import json
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from random import Random

from tests.chaos.cluster.processes import mount
from tests.chaos.cluster.stores import ENGINES as STORES
from tests.chaos.faults.decks import (
    BLOCKS,
    DISK_FAULTS,
    ENGINES,
    FAULTS,
    REFERENCES,
    REFERENCES_AND_REWINDS,
    REWINDS,
    TORCHRUN_FAULTS,
    deck,
)
from tests.chaos.figures import RESULTS, figures, write_tables
from tests.chaos.planted.selftest import TRIALS, is_caught
from tests.chaos.run import run
from tests.chaos.settings import LARGE_BUFFER, Settings
from tests.chaos.verdict.check import KINDS, Verdict
from tests.results.files import save

#: One fault of so many is for a journal on a small disk, and one for ranks that save checkpoints.
SHARE_ON_SMALL_DISK, SHARE_OF_REWINDS = 10, 5
#: And beside so many faults while ranks train samples together one more for ranks under torchrun.
SHARE_UNDER_TORCHRUN = 8


def main() -> int:
    """Run it all; the exit code."""
    options = _options()
    # A terminated run ends what it started, as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    random = Random(options.seed)
    on_small = options.faults // SHARE_ON_SMALL_DISK
    rewinds = options.faults // SHARE_OF_REWINDS
    retained = options.references // SHARE_OF_REWINDS
    may_mount = _may_mount(folder, on_small)
    runs = [
        ("run", FAULTS, options.faults - on_small - rewinds - options.torchrun, Settings()),
        ("rewinds", REWINDS, rewinds, Settings(dp_size=2, retain=True)),
        ("blocks", BLOCKS, options.blocks, Settings(dp_size=4, retain=True, max_split=4)),
        (
            "blocks-torchrun", TORCHRUN_FAULTS, options.blocks // SHARE_UNDER_TORCHRUN,
            Settings(dp_size=4, torchrun=True, max_split=4),
        ),
        (
            "small-disk", DISK_FAULTS, on_small if may_mount else 0,
            Settings(small_disk=True, buffer_samples=LARGE_BUFFER),
        ),
        ("torchrun", TORCHRUN_FAULTS, options.torchrun, Settings(dp_size=2, torchrun=True)),
        (
            "references", REFERENCES if options.engine == "file" else ENGINES,
            options.references - retained, Settings(references=True, engine=options.engine),
        ),
        (
            "references-rewinds", REFERENCES_AND_REWINDS, retained,
            Settings(dp_size=2, retain=True, references=True, engine=options.engine),
        ),
    ]  # fmt: skip
    results = [
        run(folder / name, settings, list(islice(deck(faults, random), count)), random, _say)
        for name, faults, count, settings in runs
        if count > 0
    ]
    seeds = range(options.seed, options.seed + options.seeds)
    tried = [bug for bug, trial in TRIALS.items() if options.faults or trial.settings.references]
    bugs = tried if seeds else ()
    caught = {bug: [_try(bug, folder / bug, seed) for seed in seeds] for bug in bugs}
    found = {
        "seed": options.seed,
        "faults_asked": options.faults + options.references,
        "skipped": 0 if may_mount else on_small,
    } | figures(results, caught)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=2) + "\n")
    if options.save:
        save(options.save, shlex.join(["python", "-m", "tests.chaos", *sys.argv[1:]]), found)
        write_tables()
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
    parser.add_argument(
        "--faults", type=int, default=200,
        help="faults in the run (200); 0: none, nor planted bugs, but where there are references",
    )  # fmt: skip
    parser.add_argument(
        "--references", type=int, default=40, help="and with payloads by reference (40)"
    )
    parser.add_argument(
        "--engine", choices=STORES, default="file",
        help="what those lie in (file); ray and mooncake run in build/frameworks/NAME/bin/python",
    )  # fmt: skip
    parser.add_argument("--torchrun", type=int, default=12, help="of them under torchrun (12)")
    parser.add_argument(
        "--blocks", type=int, default=0, help="and while ranks train samples together (0)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the faults (1)")
    parser.add_argument(
        "--seeds", type=int, default=3, help="of each planted bug (3); 0: none is run"
    )
    parser.add_argument(
        "--save", nargs="?", const="chaos", choices=RESULTS, help="keep it in docs/results"
    )
    parser.add_argument("--out", type=Path, default=Path("build/chaos.json"), help="figures, JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
