"""The list of tests that take long names tests that are there."""

import ast
from pathlib import Path

from tests.slow import listed, longest


def _has(root: Path, test: str) -> bool:
    path, *names = test.split("::")
    if not (root / path).exists():
        return False
    body: list[ast.stmt] = ast.parse((root / path).read_text()).body
    for name in names:
        found = [node for node in body if getattr(node, "name", _assigned(node)) == name]
        if not found:
            return name == "runTest"  # which hypothesis gives the case of a state machine
        body = getattr(found[0], "body", [])
    return True


def _assigned(node: ast.stmt) -> str | None:
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    return target.id if isinstance(target, ast.Name) else None


def test_each_is_there(root: Path) -> None:
    gone = [test for test in listed() if not _has(root, test)]
    assert not gone, f"renamed or deleted, so tests/slow.txt has to follow: {gone}"


def test_cases_of_one_function_count_together_and_short_ones_stay() -> None:
    lines = [
        "3.00s call     tests/test_a.py::test_long[1]",
        "1.50s setup    tests/test_a.py::test_long[2]",
        "3.90s call     tests/test_a.py::test_short",
        "========= 3 passed in 8.40s =========",
    ]
    assert longest(lines) == ["tests/test_a.py::test_long"]
