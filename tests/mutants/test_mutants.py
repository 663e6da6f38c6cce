"""The runner of planted bugs says which are caught, which survive, and which are none any more."""

from pathlib import Path

import pytest

from tests.mutants.__main__ import MACHINES, main
from tests.support.source import ROOT

PRODUCT = "def double(x):\n    return 2 * x\n\n\ndef triple(x):\n    return 3 * x\n"
TESTS = "from product import {0}\n\n\ndef test_{0}():\n    assert {0}(2) == {1}\n"


def patch(line: str, other: str, package: str = "package") -> str:
    return (
        f"package: {package}\nbreaks: everything\n\n--- a/workers/product.py\n"
        f"+++ b/workers/product.py\n@@ -1,6 +1,6 @@\n"
        + "".join(f"-{at}\n+{other}\n" if at == line else f" {at}\n" for at in PRODUCT.splitlines())
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A product of two functions: one has a test in its package, the other in the machines."""
    for name in ("workers", "tests/package", "tests/machines", "tests/mutants"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "workers/product.py").write_text(PRODUCT)
    (tmp_path / "tests/package/test_double.py").write_text(TESTS.format("double", 4))
    (tmp_path / "tests/machines/test_triple.py").write_text(TESTS.format("triple", 6))
    return tmp_path


def run(tree: Path, *argv: str) -> int:
    return main(["--jobs", "1", *argv], tree, ["tests/machines"])


def test_what_a_test_finds_is_caught_and_the_test_named(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tree / "tests/mutants"
    (folder / "one.patch").write_text(patch("    return 2 * x", "    return 5 * x"))
    (folder / "two.patch").write_text(patch("    return 3 * x", "    return 5 * x"))
    assert run(tree) == 0
    told = capsys.readouterr().out
    assert "caught by tests/package/test_double.py::test_double" in told
    assert "caught by tests/machines/test_triple.py::test_triple" in told
    assert "2 of 2 caught" in told
    assert (tree / "workers/product.py").read_text() == PRODUCT


def test_what_survives_is_named_and_fails_the_run(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tree / "tests/mutants"
    (folder / "alive.patch").write_text(patch("    return 2 * x", "    return x * 2"))
    (folder / "dead.patch").write_text(patch("    return 2 * x", "    return 5 * x"))
    assert run(tree, "--only", "dead") == 0
    assert run(tree) == 1
    told = capsys.readouterr().out
    assert "SURVIVES" in told
    assert "1 of 2 caught\nalive: everything" in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (patch("    return 2 * x", "    return 5 * x").replace("triple", "both"), "DOES NOT APPLY"),
        (patch("    return 2 * x", "    return 2 *"), "NO TEST RAN"),
    ],
)
def test_a_patch_that_is_no_bug_any_more_is_an_error_that_names_it(
    tree: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    (tree / "tests/mutants/old.patch").write_text(text)
    assert run(tree) == 1
    assert told in capsys.readouterr().out.partition("old")[2]


def test_a_test_that_fails_anyway_catches_nothing(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "tests/mutants/alive.patch").write_text(patch("    return 2 * x", "    return x * 2"))
    (tree / "tests/package/test_broken.py").write_text(TESTS.format("double", 5))
    assert run(tree) == 1
    assert "FAILS WITHOUT IT TOO: tests/package/test_broken.py" in capsys.readouterr().out


def test_machines_and_packages_are_there() -> None:
    for patch in (ROOT / "tests/mutants").glob("*.patch"):
        package = patch.read_text().partition("package: ")[2].partition("\n")[0]
        assert (ROOT / "tests" / package).exists(), patch.name
    assert all((ROOT / path).exists() for path in MACHINES)
