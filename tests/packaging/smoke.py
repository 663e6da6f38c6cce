"""Builds the wheel as pip does, installs it in fresh environments without torch, and uses it.

    python -m tests.packaging.smoke [--python PYTHON]

Once with the newest versions of what it requires, and once with the oldest that pyproject.toml
allows; the latter only on the oldest Python, as old versions were not built for newer ones (with
DISPATCHER_REQUIRE_TOOLS=1 another Python is an error). Nothing of this checkout or of its
environment is in reach of what runs there. It needs a package index, so it is no part of
`make test`.
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
USE = Path(__file__).with_name("use.py")
#: Neither this checkout nor this environment.
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


@dataclass(frozen=True, slots=True)
class Trial:
    """An installation: its name, and the versions demanded; with those it has a journal."""

    name: str
    pinned: tuple[str, ...] = ()


def trials(python: str) -> tuple[Trial, ...]:
    """What is tried with a Python `3.x`."""
    if python == oldest_python():
        pinned = tuple(map(oldest, requirements()))
        return Trial("newest"), Trial("oldest", pinned)
    told = f"smoke: Python {python} is not the oldest allowed, {oldest_python()}"
    if os.environ.get("DISPATCHER_REQUIRE_TOOLS") == "1":
        raise SystemExit(told)
    print(f"{told}: the oldest versions are not tried")
    return (Trial("newest"),)


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


def build(python: Path) -> Path:
    """The wheel of this tree, built as for a user, with a build environment of pip's own."""
    out = WORK / "wheel"
    shutil.rmtree(out, ignore_errors=True)
    pip(python, "wheel", "--no-deps", "--wheel-dir", out, ROOT)
    (wheel,) = out.iterdir()
    return wheel


def attempt(python: Path, wheel: Path, trial: Trial) -> None:
    """Install and use."""
    pip(python, "install", wheel, *trial.pinned)
    with TemporaryDirectory() as folder:
        journal = ["--journal"] if trial.pinned else []
        command = [str(python), "-I", str(USE), folder, *journal]
        subprocess.run(command, check=True, env=CLEAN, cwd=folder)


def main() -> None:
    """Try all; any failure is an exception."""
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--python", default=sys.executable, help="what environments are made of")
    given = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    wheel = None
    for trial in trials(version_of(given.python)):
        python = fresh(given.python, trial.name)
        wheel = wheel or build(python)
        attempt(python, wheel, trial)
        versions = ", ".join(trial.pinned) or "the newest of everything"
        print(f"smoke: {wheel.name} works with {versions}", flush=True)


if __name__ == "__main__":
    main()
