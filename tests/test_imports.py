"""The house: imports point downward, pure parts stay pure, and nothing unpickles.

    cli -> service, simulate -> journal, transport -> core, protocol -> words -> planner

Words are sample, payload, spans, hints, values, errors, ends and balance, the former name of the
planner.
The package itself leads to the service, which is loaded when it is asked for.
security (tokens and certificates from files) needs words only; service, cli and workers use it.
workers stand beside: they may use transport, protocol, security, the planner and words; nothing in
the dispatcher knows them. Above them are the integrations, each of which knows one framework, and
the engines of payload stores.
"""

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.dispatch import DispatcherCore
from tests.support.source import ROOT

WORDS = {"words"}
WORD_MODULES = {
    "sample", "payload", "spans", "hints", "values", "balance", "errors", "ends", "__version__",
}  # fmt: skip
#: Functions that look for a module by its name.
LOOK_UPS = {"find_spec", "import_module"}
#: Verbs of conversation, for which the code has send, receive, report and others. The journal keeps
#: the old name of one fact.
DIALECT = re.compile(
    r"(?<![^\W_])(?:told|untold|said|tells?|hears?|heard)(?![^\W_])", re.IGNORECASE
)
DIALECT_ALLOWED = {
    "rollout_dispatcher.core.facts": ["said"],
    "rollout_dispatcher.journal.state": ["said"],
}
#: Modules a folder, beside its subfolders.
MAX_MODULES = 18
#: Part of the house -> the parts that it may import, itself and the words included.
MAY_IMPORT = {
    part: {part, *below.split(), "planner"} | (WORDS if part != "planner" else set())
    for part, below in {
        "words": "",
        "security": "",
        "planner": "",
        "protocol": "",
        "transport": "protocol",
        "core": "",
        "record": "core",
        "simulate": "core record",
        "journal": "core",
        "service": "journal transport core protocol security record",
        "package": "service",
        "cli": "service simulate journal transport core protocol security balance record",
        "workers": "transport protocol security",
        "integrations": "workers",
        "engines": "workers protocol",
    }.items()
}
#: Third-party packages a part may import.
THIRD_PARTY = {
    "words": {"numpy"},
    "security": set(),
    "planner": {"numpy"},
    "protocol": {"pydantic"},
    "transport": {"numpy"},
    "core": {"numpy"},
    "record": {"numpy", "pydantic_core"},
    "simulate": {"numpy", "pydantic"},
    "journal": set(),
    "service": {"aiohttp", "numpy", "prometheus_client", "pydantic", "pydantic_core"},
    "package": set(),
    "cli": {"numpy", "prometheus_client", "pydantic"},
    "workers": {"numpy", "pydantic", "torch", "tensordict"},  # the last for who asks for one
    "integrations": {"torch", "trl"},
    "engines": {"mooncake", "numpy", "ray", "torch", "transfer_queue"},
}
#: Payload stores that are other people's engines.
ENGINES = {"mooncake", "ray", "transfer_queue"}
#: A part that decides, or only turns bytes into values, has no clock, loop or socket.
PURE = {"words", "planner", "core", "protocol"}
IMPURE = {"asyncio", "datetime", "os", "selectors", "socket", "subprocess", "threading", "time"}
#: Parts of the house that may hold a core.
USES_CORE = {part for part, below in MAY_IMPORT.items() if "core" in below} - {"core"}
#: What the core offers, by a name without an underscore; and what settings called `core` have.
OFFERED = {"config", "run_id"} | {name for name in vars(DispatcherCore) if not name.startswith("_")}
OFFERED |= {field.name for field in dataclasses.fields(DispatchConfig)}
#: Loading any of these formats runs what the sender wrote.
UNPICKLE = {"cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "pickle", "shelve"}
UNPICKLE_CALLS = {
    "torch.load", "torch.save", "numpy.load", "np.load", "read_pickle", "all_gather_object",
    "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list",
    "send_object_list",
}  # fmt: skip


def sources() -> list[Path]:
    roots = ("dispatcher", "workers")
    return sorted(path for root in roots for path in (ROOT / root).rglob("*.py"))


def module_of(path: Path) -> str:
    _root, *parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str | None:
    """The part of the house that a module of ours belongs to; None for others' modules."""
    package, *rest = module.split(".")
    if package == "rollout_planner":
        return "planner"
    if package == "rollout_workers":
        if rest[:1] == ["stores"] and ENGINES & set(rest[1:]):
            return "engines"
        return "integrations" if rest[:1] == ["integrations"] else "workers"
    if package != "rollout_dispatcher":
        return None
    return "words" if not rest or rest[0] in WORD_MODULES else rest[0]


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
    part = "package" if module == "rollout_dispatcher" else part_of(module)
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
        ("rollout_planner.types", "from rollout_dispatcher.sample import DType"),
        ("rollout_planner.cost", "import time"),
        ("rollout_planner.cost", "import scipy"),
        ("rollout_dispatcher.core.dispatch", "def f():\n    import asyncio"),
        ("rollout_dispatcher.core.dispatch", "from rollout_dispatcher import Dispatcher"),
        ("rollout_dispatcher", "import rollout_dispatcher.cli.main"),
        ("rollout_dispatcher.service.server", "import torch"),
        ("rollout_dispatcher.cli.demo.command", "from rollout_workers import MicroBatchStream"),
        ("rollout_workers.stream", "import rollout_dispatcher.service.config.serve"),
        ("rollout_workers.stream", "import pickle"),
    ],
)
def test_a_breach_would_be_seen(module: str, text: str) -> None:
    assert breaches(text, module) != []


@pytest.mark.parametrize(
    "text", ["torch.load(p)", "np.load(p)", "dist.broadcast_object_list(x)", "pd.read_pickle(p)"]
)
def test_a_call_that_unpickles_would_be_seen(text: str) -> None:
    assert unpickling_calls(text) != []


def reaches_inside(text: str) -> list[str]:
    """Attributes of a core, called `core` or `_core`, that are no part of what it offers."""
    looks = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    return [
        ast.unparse(look)
        for look in looks
        if ast.unparse(look.value).split(".")[-1] in {"core", "_core"}
        and not ast.unparse(look).startswith("rollout_dispatcher.")
        and look.attr not in OFFERED
    ]


@pytest.mark.parametrize(
    "path",
    [path for path in sources() if part_of(module_of(path)) in USES_CORE],
    ids=module_of,
)
def test_the_core_is_told_and_looked_at_but_not_reached_into(path: Path) -> None:
    assert reaches_inside(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "self._core.ledger.generation.number",
        "core._buffer",
        "router.core.totals.as_json",
        "setting.core._planning",
    ],
)
def test_a_reach_into_the_core_would_be_seen(text: str) -> None:
    assert reaches_inside(text) != []


@pytest.mark.parametrize("name", ["", ".errors", ".sample", ".balance", ".protocol.endpoint"])
def test_a_word_of_ours_costs_no_server(name: str) -> None:
    heavy = "{'aiohttp', 'prometheus_client', 'pydantic', 'asyncio', 'torch'}"
    script = f"import sys, rollout_dispatcher{name}; print({heavy} & sys.modules.keys())"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def named_in_calls(tree: ast.Module) -> Iterator[str]:
    """Modules that are looked for by name: the texts given to these functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in LOOK_UPS:
            given = (one.value for one in node.args if isinstance(one, ast.Constant))
            yield from (one for one in given if isinstance(one, str))


def test_only_the_source_roots_are_imported() -> None:
    """`dispatcher` and `workers` are folders here, and packages of somebody else's elsewhere."""
    ours = {
        path for root in ("dispatcher", "workers", "tests") for path in (ROOT / root).rglob("*.py")
    }
    found = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in ours
        for tree in [ast.parse(path.read_text())]
        for name in [*imported(tree, str(path)), *named_in_calls(tree)]
        if name.split(".")[0] in {"dispatcher", "workers"}
    }
    assert found == set()
    for root in "dispatcher", "workers":
        assert not (ROOT / root / "__init__.py").exists()


def test_a_folder_can_be_read_at_a_glance() -> None:
    folders = {path.parent for path in sources()}
    sizes = {folder: len([*folder.glob("[!_]*.py")]) for folder in folders}
    assert {str(folder): size for folder, size in sizes.items() if size > MAX_MODULES} == {}


def dialect(text: str) -> list[str]:
    """The words of `DIALECT` in a module, alone or as parts of names."""
    return DIALECT.findall(text)


def test_the_code_speaks_of_messages_not_of_conversation() -> None:
    found = {module_of(path): dialect(path.read_text()) for path in sources()}
    assert {module: words for module, words in found.items() if words} == DIALECT_ALLOWED


@pytest.mark.parametrize(
    "text", ["last_heard = 0", "TOLD_AT_CLOSE", "# it is said", "def _tell():"]
)
def test_a_word_of_conversation_would_be_seen(text: str) -> None:
    assert dialect(text)
    assert not dialect("heartbeat, shear, intelligence, satellite_size")
