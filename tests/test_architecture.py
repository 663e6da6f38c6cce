"""docs/architecture.md tells the truth: its map is generated, the files and names in it exist.

python -m tests.test_architecture    writes the map again
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.generated import between, rewrite
from tests.support.source import ROOT

DOC = ROOT / "docs" / "architecture.md"
ROOTS = (
    ROOT / "dispatcher" / "rollout_dispatcher",
    ROOT / "dispatcher" / "rollout_planner",
    ROOT / "workers" / "rollout_workers",
)
#: `core/dispatch.py`, or with a name in it: `core/dispatch.py:DispatcherCore.push`.
MENTION = re.compile(r"`([\w/]+\.py)(?::([\w.]+))?`")


def folders() -> list[Path]:
    """The packages of both source roots, each before what is in it."""
    return sorted(path.parent for root in ROOTS for path in root.rglob("__init__.py"))


def map_table() -> str:
    """A row a folder: what it is for, as its own docstring says, and how many modules it has."""
    rows = ["| folder | what it is for | modules |", "|---|---|---|"]
    for folder in folders():
        modules = len([*folder.glob("[!_]*.py")])
        rows.append(f"| `{folder.relative_to(ROOT)}/` | {purpose(folder)} | {modules} |")
    return "\n".join(rows)


def purpose(folder: Path) -> str:
    """The first sentence of a package's docstring."""
    told = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    return told.split("\n\n")[0].replace("\n", " ").removesuffix(".")


def mentions() -> list[tuple[str, str]]:
    return sorted(set(MENTION.findall(DOC.read_text())))


def candidates(path: str) -> list[Path]:
    """The files that a mention may mean: from the repository's root, or from a source root."""
    return [
        place / path for place in (ROOT, ROOT / "dispatcher", *ROOTS) if (place / path).exists()
    ]


@cache
def names_in(path: Path) -> frozenset[str]:
    """What a module defines: functions, classes, their methods and fields, constants."""
    found: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            match node:
                case ast.ClassDef():
                    found.add(prefix + node.name)
                    collect(node.body, f"{prefix}{node.name}.")
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    found.add(prefix + node.name)
                case ast.Assign():
                    found.update(prefix + ast.unparse(target) for target in node.targets)
                case ast.AnnAssign():
                    found.add(prefix + ast.unparse(node.target))

    collect(ast.parse(path.read_text()).body, "")
    return frozenset(found)


def test_every_folder_says_what_it_is_for() -> None:
    assert [str(folder) for folder in folders() if not purpose(folder)] == []


def test_the_map_is_up_to_date() -> None:
    text = DOC.read_text()
    start, stop = between(text, "map")
    assert text[start:stop] == map_table() + "\n", "run: python -m tests.test_architecture"


@pytest.mark.parametrize(("path", "name"), mentions())
def test_what_is_mentioned_exists(path: str, name: str) -> None:
    found = candidates(path)
    assert found, f"there is no {path}"
    assert not name or any(name in names_in(file) for file in found), f"{path} has no {name}"


def test_a_name_that_is_gone_would_be_seen() -> None:
    assert "DispatcherCore.push" in names_in(ROOTS[0] / "core" / "dispatch.py")
    assert "DispatcherCore.pushed_by_nobody" not in names_in(ROOTS[0] / "core" / "dispatch.py")


if __name__ == "__main__":
    rewrite(DOC, {"map": map_table})
