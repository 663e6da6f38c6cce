"""Planted bugs, and whether the tests find them: `make mutants`, exit code 1 if one survives.

    python -m tests.mutants [--only TEXT] [--jobs N] [--seconds 180]

A mutant is a patch in this folder, `NAME.patch`, with two lines above the diff:

    package: core               its tests are tests/core, or a file below tests/
    breaks: what goes wrong, in a sentence

It is applied to a copy of the tree in build/mutants, and caught by the first test that fails there,
and passes without it: of the package first, then of the machines that every mutant has to pass. Of
both only what `make test` runs.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from tests.support.source import ROOT

#: What every mutant has to pass beside the tests of its package.
MACHINES = (
    "tests/core/test_dispatch_machine.py",
    "tests/core/test_progress.py",
    "tests/core/references/test_references_machine.py",
    "tests/histories/test_histories.py",
)
#: What a copy of the tree has of it.
COPIED = (
    "dispatcher",
    "workers",
    "tests",
    "docs",
    "deploy",
    "examples",
    "*.md",
    "*.toml",
    "Makefile",
)
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """One planted bug."""

    patch: Path
    package: str
    breaks: str

    @classmethod
    def read(cls, patch: Path) -> "Mutant":
        head = patch.read_text().partition("\n--- ")[0]
        found = dict(re.findall(r"^(package|breaks): (.+)$", head, re.MULTILINE))
        missing = [name for name in ("package", "breaks") if name not in found]
        if missing:
            raise SystemExit(f"{patch.name} does not say its {' and '.join(missing)}")
        return cls(patch, found["package"], found["breaks"])

    @property
    def name(self) -> str:
        return self.patch.stem


@dataclass(frozen=True)
class Verdict:
    """caught_by: the test that failed; wrong: why nothing can be said of the mutant."""

    mutant: Mutant
    seconds: float
    caught_by: str = ""
    wrong: str = ""

    def __str__(self) -> str:
        what = self.wrong or (f"caught by {self.caught_by}" if self.caught_by else "SURVIVES")
        return f"{self.mutant.name:<32}{self.mutant.package:<20}{self.seconds:>6.0f} s  {what}"


def judge(mutant: Mutant, root: Path, machines: Sequence[str], seconds: float) -> Verdict:
    """Apply a patch to a copy of the tree, and run the tests there until one fails."""
    began, folder = monotonic(), root / "build" / "mutants" / mutant.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        for path in (path for name in COPIED for path in root.glob(name)):
            if path.is_dir():
                leave = shutil.ignore_patterns("__pycache__", "mutants", "*.pyc")
                shutil.copytree(path, folder / path.name, ignore=leave)
            else:
                shutil.copy2(path, folder)
        if problem := _apply(mutant.patch, folder):
            return Verdict(mutant, 0, wrong=f"DOES NOT APPLY: {problem}")
        for tests in ([f"tests/{mutant.package}"], [*machines]):
            left = seconds - (monotonic() - began)
            caught_by, wrong = _run(tests, folder, left)
            if caught_by and _fails_without(mutant, caught_by, folder, seconds):
                caught_by, wrong = "", f"FAILS WITHOUT IT TOO: {caught_by}"
            if caught_by or wrong:
                return Verdict(mutant, monotonic() - began, caught_by, wrong)
        return Verdict(mutant, monotonic() - began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fails_without(mutant: Mutant, test: str, folder: Path, seconds: float) -> bool:
    """Whether a test that has caught a mutant would have failed anyway."""
    _apply(mutant.patch, folder, "--reverse")
    return _run([test], folder, seconds)[0] != ""


def _apply(patch: Path, folder: Path, *how: str) -> str:
    """What is wrong with the patch, if anything."""
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(
        ["git", "apply", *how, str(patch)],
        cwd=folder, env=alone, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stderr.strip()


def _run(tests: list[str], folder: Path, seconds: float) -> tuple[str, str]:
    """The test that fails, or why none could run; neither if all pass, or time is over."""
    roots = [folder, folder / "dispatcher", folder / "workers"]
    quick = ["-m", "not slow"]  # what `make test` runs
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *quick, *tests]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, roots))}
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return "", ""
    if code == 1:
        found = FAILED.search(log.read_text())
        return (found[1] if found else "a test"), ""
    return "", "" if code == 0 else f"NO TEST RAN: {log.read_text()[-500:]}"


def judge_all(
    mutants: Sequence[Mutant], jobs: int, seconds: float, root: Path, machines: Sequence[str]
) -> Iterator[Verdict]:
    """As they come."""
    with ThreadPoolExecutor(jobs) as threads:
        yield from threads.map(lambda each: judge(each, root, machines, seconds), mutants)


def main(
    argv: Sequence[str] | None = None, root: Path = ROOT, machines: Sequence[str] = MACHINES
) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--only", default="", help="those whose name or package has this in it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=180.0, help="for each")
    options = parser.parse_args(argv)
    mutants = [Mutant.read(path) for path in sorted((root / "tests/mutants").glob("*.patch"))]
    chosen = [each for each in mutants if options.only in f"{each.name} {each.package}"]
    if not chosen:
        print(f"no mutant has {options.only!r} in its name or package")
        return 2
    verdicts = []
    for verdict in judge_all(chosen, options.jobs, options.seconds, root, machines):
        print(verdict, flush=True)
        verdicts.append(verdict)
    caught = sum(bool(verdict.caught_by) for verdict in verdicts)
    print(f"{caught} of {len(verdicts)} caught")
    for verdict in verdicts:
        if not verdict.caught_by:
            print(f"{verdict.mutant.name}: {verdict.mutant.breaks}")
    return 0 if caught == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
