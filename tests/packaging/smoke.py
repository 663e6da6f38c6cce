"""Builds the wheels as pip does, installs them in fresh environments without torch, and uses them.

    python -m tests.packaging.smoke [--python PYTHON]

The planner alone, the dispatcher, and beside it a client in an environment without the server's
libraries. The dispatcher once with the newest versions of what it requires, and once with the
oldest that pyproject.toml allows; the latter only on the oldest Python, as old versions were not
built for newer ones (with DISPATCHER_REQUIRE_TOOLS=1 another Python is an error). Nothing of this
checkout or of its environment is in reach of what runs there. It needs a package index, so it is no
part of `make test`.
"""

import os
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.packaging.oldest import oldest, oldest_python, requirements
from tests.support.source import ROOT

WORK = ROOT / "build" / "smoke"
PLANNER = ROOT / "dispatcher" / "rollout_planner"
#: Neither this checkout nor this environment.
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


@dataclass(frozen=True, slots=True)
class Trial:
    """An installation: its name, the extras and versions demanded, and the script that uses it.

    extras: as in `[server]`; None for the planner alone.
    """

    name: str
    extras: str | None
    use: tuple[str, ...]
    pinned: tuple[str, ...] = ()


def trials(python: str) -> tuple[Trial, ...]:
    """What is tried with a Python `3.x`."""
    command = str(WORK / "newest" / "bin" / "dispatcher")
    newest = (
        Trial("planner", None, ("use_planner.py",)),
        Trial("newest", "[server]", ("use.py", ".")),
        Trial("client", "", ("use.py", ".", "--dispatcher", command)),
    )
    if python == oldest_python():
        pinned = tuple(map(oldest, requirements()))
        return *newest, Trial("oldest", "[server]", ("use.py", ".", "--journal"), pinned)
    told = f"smoke: Python {python} is not the oldest allowed, {oldest_python()}"
    if os.environ.get("DISPATCHER_REQUIRE_TOOLS") == "1":
        raise SystemExit(told)
    print(f"{told}: the oldest versions are not tried")
    return newest


def version_of(python: str) -> str:
    """`3.11`"""
    ask = "import sys; print(*sys.version_info[:2], sep='.')"
    return subprocess.run(
        [python, "-I", "-c", ask], check=True, capture_output=True, text=True
    ).stdout.strip()


def fresh(python: str, name: str) -> Path:
    """A new environment; its Python."""
    shutil.rmtree(WORK / name, ignore_errors=True)
    subprocess.run([python, "-m", "venv", WORK / name], check=True, env=CLEAN)
    return WORK / name / "bin" / "python"


def pip(python: Path, *arguments: str | Path) -> None:
    """Run pip in an environment."""
    command: list[str | Path] = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    command += arguments
    subprocess.run(command, check=True, env=CLEAN)


def build(python: Path) -> list[Path]:
    """The wheels of this tree, ours and the planner's, each built in an environment of pip's."""
    out = WORK / "wheels"
    shutil.rmtree(out, ignore_errors=True)
    pip(python, "wheel", "--no-deps", "--wheel-dir", out, ROOT, PLANNER)
    return sorted(out.iterdir())


def attempt(python: Path, wheels: list[Path], trial: Trial) -> None:
    """Install and use."""
    ours, planner = wheels
    chosen = [planner] if trial.extras is None else [planner, f"{ours}{trial.extras}"]
    pip(python, "install", *chosen, *trial.pinned)
    script, *arguments = trial.use
    command = [str(python), "-I", str(Path(__file__).with_name(script)), *arguments]
    with TemporaryDirectory() as folder:
        subprocess.run(command, check=True, env=CLEAN, cwd=folder)


def main() -> None:
    """Try all; any failure is an exception."""
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--python", default=sys.executable, help="what environments are made of")
    given = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    wheels: list[Path] = []
    for trial in trials(version_of(given.python)):
        python = fresh(given.python, trial.name)
        wheels = wheels or build(python)
        attempt(python, wheels, trial)
        versions = ", ".join(trial.pinned) or "the newest of everything"
        print(f"smoke: {trial.name} works with {versions}", flush=True)


if __name__ == "__main__":
    main()
