"""Whoever installs gets all of it: what is in the sdist and the wheel, and what an index shows."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rollout_dispatcher import __version__
from tests.packaging.build import Distributions, distributions

PACKAGES = {"rollout_dispatcher": "dispatcher", "rollout_workers": "workers"}
PLANNER = "dispatcher/rollout_planner"


@pytest.fixture(scope="module")
def built(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Both distributions of this tree."""
    return distributions(root, tmp_path_factory.mktemp("distributions"))


@pytest.fixture(scope="module")
def planner(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Both of the planner."""
    return distributions(root / PLANNER, tmp_path_factory.mktemp("planner"))


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text())


def test_the_sdist_is_the_repository(built: Distributions, root: Path) -> None:
    if not (root / ".git").exists():
        pytest.skip("this is no checkout, which knows what belongs to it")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    tracked = {name for name in listed.split("\0") if name and (root / name).is_file()}
    assert built.sdist.keys() - tracked == {"PKG-INFO"}
    assert tracked - built.sdist.keys() == set()
    assert [name for name in tracked if built.sdist[name] != (root / name).read_bytes()] == []


def test_the_wheel_has_the_packages_and_nothing_else(
    built: Distributions, root: Path, project: dict[str, Any]
) -> None:
    expected = set()
    for package, source in PACKAGES.items():
        for path in (root / source / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                expected.add(path.relative_to(root / source).as_posix())
    info = f"rollout_dispatcher-{project['project']['version']}.dist-info"
    about = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    assert built.wheel.keys() == expected | {f"{info}/{name}" for name in about}
    assert {f"{package}/py.typed" for package in PACKAGES} <= built.wheel.keys()


def test_the_wheel_of_the_planner_has_its_package_and_nothing_else(
    planner: Distributions, root: Path
) -> None:
    paths = (root / PLANNER).rglob("*")
    code = {path for path in paths if path.suffix == ".py" or path.name == "py.typed"}
    expected = {path.relative_to((root / PLANNER).parent).as_posix() for path in code}
    found = {name for name in planner.wheel if ".dist-info/" not in name}
    assert found == expected
    assert planner.metadata["Name"] == "rollout-planner"
    assert planner.metadata.get_all("Requires-Dist") == ["numpy>=1.26"]
    (licence,) = (data for name, data in planner.wheel.items() if name.endswith("/LICENSE"))
    assert licence == (root / "LICENSE").read_bytes()


def test_both_are_of_one_version_and_one_oldest_python(
    built: Distributions, planner: Distributions
) -> None:
    assert built.metadata["Version"] == planner.metadata["Version"] == __version__
    assert built.metadata["Requires-Python"] == planner.metadata["Requires-Python"]
    needed = built.metadata.get_all("Requires-Dist", [])
    assert f"rollout-planner=={__version__}" in needed
    assert set(planner.metadata.get_all("Requires-Dist", [])) < set(needed)


def test_a_wheel_of_the_sdist_is_the_same(built: Distributions, planner: Distributions) -> None:
    assert built.wheel_of_sdist == built.wheel
    assert planner.wheel_of_sdist == planner.wheel


def test_the_command_is_installed(built: Distributions) -> None:
    (entry,) = (data for name, data in built.wheel.items() if name.endswith("entry_points.txt"))
    lines = entry.decode().split("\n")
    assert "dispatcher = rollout_dispatcher.cli.main:main" in lines


def test_classifiers_name_the_oldest_python_first(built: Distributions) -> None:
    classifiers = built.metadata.get_all("Classifier", [])
    found = [re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", c) for c in classifiers]
    minors = [int(one[1]) for one in found if one]
    assert built.metadata["Requires-Python"] == f">=3.{minors[0]}"
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert "Typing :: Typed" in classifiers


def test_no_address_is_named_that_is_not_there(built: Distributions) -> None:
    """There is no public repository yet: name it here and in pyproject.toml once there is."""
    assert built.metadata.get_all("Project-URL") is None
    assert built.metadata["Home-page"] is None


def test_what_an_index_shows_links_to_nothing_that_is_not_there(
    built: Distributions, root: Path
) -> None:
    links = r"\[[^\]]+\]\(([^)]+)\)"
    shown = str(built.metadata.get_payload())
    assert [link for link in re.findall(links, shown) if not link.startswith("#")] == []
    named = re.findall(r"`([^`]+)` in the source distribution", shown)
    assert named == re.findall(links, (root / "README.md").read_text())
    paths = [name.partition("#")[0] for name in named]
    for name in paths:
        assert [path for path in built.sdist if path == name or path.startswith(f"{name}/")]


def test_the_checks_build_with_what_a_user_builds_with(project: dict[str, Any]) -> None:
    wanted = set(project["build-system"]["requires"])
    assert wanted <= set(project["project"]["optional-dependencies"]["dev"])
