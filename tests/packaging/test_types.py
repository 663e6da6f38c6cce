"""A user's type checker sees our types, installed as a wheel or as `pip install -e` does it.

The environments have nothing else in them, no torch and no numpy: what is missing there must not
become an error of the user's.
"""

import re
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import rollout_workers
from tests.packaging.build import build

GOOD = """
from collections.abc import Iterator
from rollout_planner import karmarkar_karp
from rollout_dispatcher.errors import DispatcherError
from rollout_workers import {names}

def push(rollouts: Iterator[list[int]]) -> int:
    pushed = 0
    with RolloutProducer("127.0.0.1:7077") as producer:
        for ids in rollouts:
            try:
                producer.push({{"input_ids": ids}}, group_id="p17", policy_version=3)
            except DispatcherError:
                continue
            pushed += 1
    return pushed

reveal_type(RankClient("127.0.0.1:7077", dp_rank=0, dp_size=1).next_step())
"""

WRONG = """
from rollout_workers import RolloutProducer
from rollout_workers import NoSuchName

RolloutProducer(7077)
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """An environment with the project and nothing else."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def mypy(self, code: str) -> str:
        """What mypy says of a project that uses it."""
        project = self.folder / "project"
        project.mkdir(exist_ok=True)
        (project / "train.py").write_text(code)
        command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--show-error-codes"]
        command += ["--cache-dir", str(self.folder / "cache"), "--python-executable"]
        command += [str(self.python), "train.py"]
        return run(command, project)


def run(command: list[str], folder: Path) -> str:
    """What a command prints, without this checkout's environment."""
    clean = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=folder, env=clean
    )
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module", params=["wheel", "wheel:editable"])
def installed(
    request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Installed:
    """Installed by unpacking, as pip does, which would ask an index for the dependencies."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python3.*/site-packages")
    for name in ("", "dispatcher/rollout_planner"):
        with zipfile.ZipFile(build(root / name, folder / "dist" / name, request.param)) as wheel:
            wheel.extractall(site)
    return Installed(folder)


def test_it_is_what_is_imported(installed: Installed, root: Path) -> None:
    editable = not list(installed.folder.glob("lib/*/site-packages/rollout_workers"))
    ask = "import rollout_workers as w; print(w.__file__)"
    home = Path(run([str(installed.python), "-c", ask], installed.folder).strip())
    assert home.is_relative_to(root if editable else installed.folder)


def test_a_project_that_uses_all_names_has_no_errors_and_has_types(installed: Installed) -> None:
    names = ", ".join(vars(rollout_workers)["__all__"])
    revealed, *said = installed.mypy(GOOD.format(names=names)).splitlines()
    assert re.search(r'Revealed type is "rollout_workers\.[a-z_.]+\.RankStep \| None"', revealed)
    assert said == ["Success: no issues found in 1 source file"]


def test_a_mistake_is_found(installed: Installed) -> None:
    said = installed.mypy(WRONG)
    assert re.findall(r"error: .* \[([a-z-]+)\]$", said, re.MULTILINE) == [
        "attr-defined",
        "arg-type",
    ]
