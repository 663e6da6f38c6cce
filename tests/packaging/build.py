"""Builds both distributions without a package index, and looks into them."""

import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Distributions:
    """Contents by path in it, for either; the sdist's without its leading folder."""

    sdist: dict[str, bytes]
    wheel: dict[str, bytes]
    wheel_of_sdist: dict[str, bytes]

    @property
    def metadata(self) -> Message:
        """What an index shows; the payload is the description."""
        return parsed(self.wheel, "METADATA")


def distributions(source: Path, work: Path) -> Distributions:
    """The sdist and the wheel of a tree, and the wheel of that sdist."""
    sdist = build(source, work, "sdist")
    wheel = build(source, work / "of-tree", "wheel")
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11 has it from 3.11.4 on
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(work)
    unpacked = work / sdist.name.removesuffix(".tar.gz")
    again = build(unpacked, work / "of-sdist", "wheel")
    assert again.name == wheel.name
    return Distributions(files(unpacked), zipped(wheel), zipped(again))


def build(source: Path, out: Path, target: str) -> Path:
    """One distribution, by the backend that pyproject.toml names, as it is installed here.

    target: sdist, wheel, or wheel:editable (what `pip install -e` installs).
    """
    # -I: the planner's folder, where its build runs, has modules named as some of Python's own.
    command = [sys.executable, "-I", "-m", "hatchling", "build", "--target", target]
    made = subprocess.run(
        [*command, "--directory", out], cwd=source, check=False, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout + made.stderr
    (found,) = out.glob("*.tar.gz" if target == "sdist" else "*.whl")
    return found


def files(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def zipped(path: Path) -> dict[str, bytes]:
    """All files of a wheel."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def parsed(wheel: dict[str, bytes], name: str) -> Message:
    """A file of the wheel's dist-info."""
    (text,) = (data for path, data in wheel.items() if path.endswith(f".dist-info/{name}"))
    return Parser().parsestr(text.decode())
