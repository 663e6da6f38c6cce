"""Other people's modules, read from a folder: their files run, their dependencies stay away.

Invariant: after `load`, `sys.modules` is as it was: a stub is never in anyone else's way.
"""

import importlib
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

#: Where the Makefile unpacks the wheels of peers.
UNPACKED = Path("build/bench/peers")


class _HasAll(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class Anything(metaclass=_HasAll):
    """What a stub has under every name: a base class, a decorator, a function that answers no."""

    def __new__(cls, *args: Any, **_: Any) -> Any:
        """Used as a decorator, it leaves what it decorates as it is."""
        return args[0] if len(args) == 1 and callable(args[0]) else super().__new__(cls)

    def __getattr__(self, name: str) -> Any:
        """Any method, which does nothing."""
        return Anything

    def __bool__(self) -> bool:
        """`if is_available():` is not taken."""
        return False


class Stub(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        """Anything, but what the import system asks for."""
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


def load(
    root: Path,
    name: str,
    stubs: Collection[str] = (),
    instead: Mapping[str, ModuleType] | None = None,
) -> Any:
    """Module `name` below the folder `root`, without what its packages' `__init__` would import.

    stubs: modules that are not there, or too heavy. instead: modules that take others' places.
    Raises ImportError if it needs others still.
    """
    top = name.partition(".")[0]
    given = {stub: Stub(stub) for stub in stubs} | dict(instead or {})
    ours = {key: sys.modules.pop(key) for key in list(sys.modules) if _is_of(key, top, given)}
    sys.modules.update(_bare_packages(root, name))
    sys.modules.update(given)
    try:
        return importlib.import_module(name)
    finally:
        for key in [key for key in sys.modules if _is_of(key, top, given)]:
            del sys.modules[key]
        sys.modules.update(ours)


def _is_of(key: str, top: str, given: Collection[str]) -> bool:
    return key in given or key == top or key.startswith(f"{top}.")


def _bare_packages(root: Path, name: str) -> dict[str, ModuleType]:
    """The packages around a module: where its neighbours are found, and nothing else."""
    found: dict[str, ModuleType] = {}
    parts = name.split(".")[:-1]
    for end in range(1, len(parts) + 1):
        package = ModuleType(".".join(parts[:end]))
        package.__path__ = [str(root.joinpath(*parts[:end]))]
        found[package.__name__] = package
    return found


def commit_of(folder: Path) -> str:
    """Commit and date of a clone; `unknown` where it is none."""
    command = ["git", "-C", str(folder), "log", "-1", "--format=%h of %cs"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode or not (folder / ".git").exists():
        return "unknown"
    return found.stdout.strip()


def version_of(folder: Path, distribution: str) -> str:
    """Version of a wheel unpacked in `folder`."""
    found = sorted(folder.glob(f"{distribution}-*.dist-info"))
    return found[-1].name.removeprefix(f"{distribution}-").removesuffix(".dist-info")
