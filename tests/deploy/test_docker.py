"""The image is what it promises: no torch, no root, and a health check that exists."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from rollout_dispatcher.cli.main import COMMANDS, main
from rollout_dispatcher.cli.problems import ENV_PREFIX
from tests.support.options import OPTIONS


@pytest.fixture
def dockerfile(root: Path) -> str:
    text = (root / "deploy" / "docker" / "Dockerfile").read_text()
    without_comments = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    return without_comments.replace("\\\n", " ")


def test_what_it_installs_does_not_ask_for_torch(dockerfile: str, root: Path) -> None:
    installed = re.findall(r"pip install (.*)", dockerfile)
    assert installed == ["--no-cache-dir ./dispatcher/rollout_planner '.[server]'"]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["server"]
    names = {re.split(r"[<>=\[ ]", item)[0] for item in needed}
    assert not names & {"torch", "rollout-dispatcher", "numba", "scipy", "ray"}


def test_it_does_not_run_as_root(dockerfile: str) -> None:
    users = re.findall(r"^USER (\S+)", dockerfile, flags=re.MULTILINE)
    assert users == ["10001"]


def test_the_health_check_is_a_command_that_runs(dockerfile: str) -> None:
    found = re.search(r"HEALTHCHECK .* CMD (\[.*\])", dockerfile)
    assert found is not None
    program, *argv = json.loads(found[1])
    assert program == "dispatcher"
    nowhere = ["--http", "unix:/nonexistent", "--timeout", "1ms"]
    assert main([*argv, *nowhere]) == 1  # not 2: it understood the arguments


def test_it_starts_a_command_that_exists(dockerfile: str) -> None:
    command = re.search(r"^CMD (\[.*\])", dockerfile, flags=re.MULTILINE)
    assert command is not None
    assert json.loads(command[1])[0] in COMMANDS


def test_the_variables_that_it_sets_are_options(dockerfile: str) -> None:
    variables = re.findall(rf"{ENV_PREFIX}(\w+)=", dockerfile)
    assert variables
    assert {name.lower() for name in variables} <= OPTIONS.keys()


def test_what_it_copies_is_let_into_the_build(dockerfile: str, root: Path) -> None:
    ignored = (root / "deploy" / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--)(.*) \S+$", dockerfile, flags=re.MULTILINE)
    assert {name for line in copied for name in line.split()} == allowed
