"""The house: imports point downward, pure parts stay pure, and nothing unpickles.

    cli -> service, simulate -> journal, net -> core, wire -> balance -> words

Words are sample, plan and errors.
security (tokens and certificates from files) needs words only; service, cli and workers use it.
workers stand beside: they may use net, wire, security, balance and words; nothing in dispatcher
knows them.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

WORDS = {"words"}
#: Part of the house -> the parts that it may import, itself included.
MAY_IMPORT = {
    "words": WORDS,
    "security": {"security"} | WORDS,
    "balance": {"balance"} | WORDS,
    "wire": {"wire"} | WORDS,
    "net": {"net", "wire"} | WORDS,
    "core": {"core", "balance"} | WORDS,
    "simulate": {"simulate", "core", "balance"} | WORDS,
    "journal": {"journal", "core"} | WORDS,
    "service": {"service", "journal", "net", "core", "wire", "security", "balance"} | WORDS,
    "cli": {"cli", "service", "simulate", "journal", "net", "core", "wire", "security", "balance"}
    | WORDS,
    "workers": {"workers", "net", "wire", "security", "balance"} | WORDS,
}  # fmt: skip
#: Third-party packages a part may import.
THIRD_PARTY = {
    "words": {"numpy"},
    "security": set(),
    "balance": {"numpy"},
    "wire": {"pydantic"},
    "net": {"numpy"},
    "core": {"numpy"},
    "simulate": {"numpy"},
    "journal": {"lmdb"},
    "service": {"aiohttp", "numpy", "prometheus_client", "pydantic"},
    "cli": {"numpy", "prometheus_client", "pydantic"},
    "workers": {"numpy", "pydantic", "torch"},
}
#: A part that decides, or only turns bytes into values, has no clock, loop or socket.
PURE = {"words", "balance", "core", "wire"}
IMPURE = {"asyncio", "datetime", "os", "selectors", "socket", "subprocess", "threading", "time"}
#: Loading any of these formats runs what the sender wrote.
UNPICKLE = {"cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "pickle", "shelve"}
UNPICKLE_CALLS = {
    "torch.load", "torch.save", "numpy.load", "np.load", "read_pickle", "all_gather_object",
    "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list",
    "send_object_list",
}  # fmt: skip


def sources() -> list[Path]:
    return sorted([*ROOT.glob("dispatcher/**/*.py"), *ROOT.glob("workers/**/*.py")])


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str | None:
    """The part of the house that a module of ours belongs to; None for others' modules."""
    package, *rest = module.split(".")
    if package == "workers":
        return "workers"
    if package != "dispatcher":
        return None
    is_word = not rest or rest[0] in {"sample", "plan", "errors", "__version__"}
    return "words" if is_word else rest[0]


def imported(tree: ast.Module, module: str) -> Iterator[str]:
    """Every module that is imported anywhere in a file, functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import; write it in full"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def breaches(text: str, module: str) -> list[str]:
    """What is wrong with the imports of a module with this source."""
    part = part_of(module)
    assert part in MAY_IMPORT, f"{module} has no place in the house; give it one here"
    found = []
    for name in imported(ast.parse(text), module):
        package, own = name.split(".")[0], part_of(name)
        if own is not None and own not in MAY_IMPORT[part]:
            found.append(f"{module} ({part}) imports {name} ({own})")
        if own is None and package not in sys.stdlib_module_names | THIRD_PARTY[part]:
            found.append(f"{module} ({part}) imports {package}")
        if part in PURE and package in IMPURE:
            found.append(f"{module} ({part}) is pure and imports {package}")
        if package in UNPICKLE:
            found.append(f"{module} imports {package}")
    return found


def unpickling_calls(text: str) -> list[str]:
    """Calls, by dotted name or by last word, that would unpickle or pickle."""
    calls = (node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    names = [ast.unparse(call) for call in calls]
    return [name for name in names if {name, name.split(".")[-1]} & UNPICKLE_CALLS]


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_imports_point_downward(path: Path) -> None:
    assert breaches(path.read_text(), module_of(path)) == []


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_nothing_unpickles(path: Path) -> None:
    assert unpickling_calls(path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("dispatcher.sample", "import dispatcher.balance.cost"),
        ("dispatcher.balance.cost", "from dispatcher.core import buffer"),
        ("dispatcher.balance.cost", "import time"),
        ("dispatcher.balance.cost", "import scipy"),
        ("dispatcher.core.dispatch", "def f():\n    import asyncio"),
        ("dispatcher.core.dispatch", "from dispatcher.wire.frame import Frame"),
        ("dispatcher.wire.frame", "import socket"),
        ("dispatcher.service.server", "import torch"),
        ("dispatcher.service.server", "from dispatcher.cli import main"),
        ("dispatcher.simulate.profiles", "import dispatcher.service.config"),
        ("dispatcher.cli.demo", "from workers import MicroBatchStream"),
        ("workers.stream", "from dispatcher.service.config import ServeConfig"),
        ("workers.stream", "import pickle"),
    ],
)
def test_a_breach_would_be_seen(module: str, text: str) -> None:
    assert breaches(text, module) != []


@pytest.mark.parametrize(
    "text", ["torch.load(p)", "np.load(p)", "dist.broadcast_object_list(x)", "pd.read_pickle(p)"]
)
def test_a_call_that_unpickles_would_be_seen(text: str) -> None:
    assert unpickling_calls(text) != []
