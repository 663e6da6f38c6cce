"""verl's own Karmarkar-Karp, from the wheel that `make bench` unpacks into `build/bench/peers`.

The file is loaded by its path. What it imports from the rest of verl serves its other functions;
stubs stand in for that, so that verl's dependencies need not be installed.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

PEERS = Path("build/bench/peers")
KarmarkarKarp = Callable[[list[float], int, bool], list[list[int]]]


class _Stub(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


def load_karmarkar_karp() -> KarmarkarKarp | None:
    """The `karmarkar_karp` of verl; None if its wheel is not there."""
    path = PEERS / "verl/utils/seqlen_balancing.py"
    if not path.exists():
        return None
    for name in ("verl", "verl.protocol", "verl.utils", "verl.utils.device"):
        sys.modules.setdefault(name, _Stub(name))
    spec = importlib.util.spec_from_file_location("verl.utils.seqlen_balancing", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: KarmarkarKarp = module.karmarkar_karp
    return found
