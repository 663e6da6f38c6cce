"""Payloads by reference beside every engine used bare: `tests.bench.references`, a row an engine.

    python -m tests.bench.engines [--engines file ray] [--pairs 5] [--json FILE]

Each runs in an environment of its own, build/frameworks/NAME, but files, which need none; one that
is not there is skipped, and that is said. Rates and ratios are of samples of 10 MB; the bytes that
go through the dispatcher are those of a sample of 10 kB, and of one of 10 MB.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.source import PYTHONPATH, ROOT

ENGINES = ("file", "mooncake", "ray")
SMALL, LARGE = 10 << 10, 10 << 20
#: Samples a run: some seconds of either size.
SAMPLES = {SMALL: 400, LARGE: 160}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--pairs", type=int, default=5, help="of runs, ours and bare")
    parser.add_argument("--json", type=Path, default=Path("build/bench/references.json"))
    options = parser.parse_args()
    rows = []
    for name in options.engines:
        python = python_of(name)
        if python.exists():
            rows.append(row(name, python, options.pairs))
            print(line(rows[-1]), flush=True)
        else:
            print(f"SKIPPED: {name}, as there is no {python}; make it with tests.frameworks.run")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(rows, indent=2) + "\n")


def python_of(name: str) -> Path:
    """What runs an engine."""
    if name == "file":
        return Path(sys.executable)
    return ROOT / "build" / "frameworks" / name / "bin" / "python"


def row(name: str, python: Path, pairs: int) -> dict[str, Any]:
    """What is kept of an engine."""
    large, small = measured(name, python, LARGE, pairs), measured(name, python, SMALL, 1)
    return {
        "name": f"{name}-reference-10m",
        "ratio": large["ratio"],
        "lowest": min(large["ratios"]),
        "highest": max(large["ratios"]),
        "pairs": len(large["ratios"]),
        "samples_per_second": large["ours"],
        "bare_samples_per_second": large["bare"],
        "wire_bytes_10m": large["wire_bytes"],
        "wire_bytes_10k": small["wire_bytes"],
    }


def measured(name: str, python: Path, nbytes: int, pairs: int) -> Any:
    """The figures of one size."""
    options = {"store": name, "bytes": nbytes, "samples": SAMPLES[nbytes], "pairs": pairs}
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return figures_of(python, "tests.bench.references", words)


def figures_of(python: Path, module: str, words: Sequence[str]) -> Any:
    """What a benchmark writes as JSON that another interpreter runs."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        with Path(folder, "log").open("wb+") as log:
            done = subprocess.run(
                [python, "-m", module, *words, "--json", file],
                check=False, cwd=ROOT, env=os.environ | {"PYTHONPATH": PYTHONPATH},
                stdout=log, stderr=log,
            )  # fmt: skip
            if done.returncode:
                log.seek(0)
                sys.exit(f"{module} failed:\n{log.read().decode(errors='replace')}")
        return json.loads(file.read_text())


def line(of: dict[str, Any]) -> str:
    """A row as it is printed."""
    return (
        f"{of['name']:24} {of['ratio']:.2f} of the engine used bare "
        f"({of['lowest']:.2f} to {of['highest']:.2f}, {of['pairs']} pairs), "
        f"{of['samples_per_second']:.1f} beside {of['bare_samples_per_second']:.1f} samples/s; "
        f"bytes a sample through the dispatcher: {of['wire_bytes_10k']:.0f} at 10 kB, "
        f"{of['wire_bytes_10m']:.0f} at 10 MB"
    )


if __name__ == "__main__":
    main()
