"""Measures again what docs/results holds, and writes the tables of docs/ from it.

    python -m tests.results.measure [NAME ...]     # all: about 70 minutes on two idle cores

It needs the real traces beside the checkout, and the peers that `make results` installs. Times are
worth something only if the machine does nothing else.
"""

import json
import os
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.bench.cells import TRACES
from tests.results.files import save
from tests.results.tables import write_all
from tests.support.source import PYTHONPATH, ROOT

#: Name of the result file -> the command; it writes FILE, or prints JSON where there is no FILE.
COMMANDS = {
    "planner": "python -m tests.bench.planner --json FILE",
    "mix": "python -m tests.bench.mix --json FILE",
    "blocks": "python -m tests.bench.blocks --json FILE",
    "splitting": "python -m tests.bench.splitting --json FILE",
    "seams": "python -m tests.bench.seams --json FILE",
    "fitted": "python -m tests.bench.fitted --json FILE",
    "uneven": "python -m tests.bench.uneven --json FILE",
    "peers": "python -m tests.peers --json FILE",
    "plane": "python -m tests.bench.plane --json FILE",
    "inline-limit": "python -m tests.bench.inline_limit --kib 256 1024 4096 --pairs 7 --json FILE",
    "training": "python -m tests.bench.training --json FILE",
    "convergence": "python -m tests.convergence --json FILE",
}
#: Of these every run of a row is in what the command writes.
PLANES = ("plane",)
DISPATCHER = ["-m", "rollout_dispatcher.cli.main"]


def run(command: str) -> Any:
    """The figures that a command writes or prints."""
    program, *words = shlex.split(command)
    with TemporaryDirectory() as folder:
        file = Path(folder, "figures.json")
        words = [str(file) if word == "FILE" else word for word in words]
        argv = [sys.executable, *(DISPATCHER if program == "dispatcher" else []), *words]
        subprocess.run(
            argv,
            check=True,
            cwd=folder if program == "dispatcher" else ROOT,
            env=os.environ | {"PYTHONPATH": PYTHONPATH},
            stdout=None if str(file) in words else file.open("wb"),
        )
        return json.loads(file.read_text())


def without_single_runs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of a row's runs the lowest, the highest and their number."""
    return [
        {name: value for name, value in row.items() if name != "runs"}
        | {"lowest": min(row["runs"]), "highest": max(row["runs"]), "runs": len(row["runs"])}
        for row in rows
    ]


def measure(name: str) -> None:
    """Run one command and keep what it found."""
    print(f"== {name}: {COMMANDS[name]}", flush=True)
    figures = run(COMMANDS[name])
    save(name, COMMANDS[name], without_single_runs(figures) if name in PLANES else figures)


def main() -> None:
    """Measure what is asked for, or all."""
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(COMMANDS))
    names = parser.parse_args().names or list(COMMANDS)
    if unknown := set(names) - COMMANDS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(COMMANDS)}")
    if not TRACES.is_dir():
        parser.error(f"the real traces are not in {TRACES}")
    for name in names:
        measure(name)
    write_all()


if __name__ == "__main__":
    main()
