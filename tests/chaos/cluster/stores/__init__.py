"""The payload store of a chaos run, whichever engine it is of: `open_engine`."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from tests.chaos.cluster.stores.store import Store

#: The module and the class of each, loaded when asked for: an engine is not everywhere.
ENGINES = {"file": "FileEngine", "mooncake": "MooncakeEngine", "ray": "RayEngine"}


def open_engine(name: str, folder: Path) -> Store:
    """Start one. folder: a new one, for whatever it keeps."""
    module = import_module(f"tests.chaos.cluster.stores.{name}")
    engine: Callable[[Path], Store] = getattr(module, ENGINES[name])
    return engine(folder)
