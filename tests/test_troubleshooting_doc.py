"""docs/guide.md and operate.md: what they quote and name is there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from rollout_dispatcher import errors
from rollout_dispatcher.core.facts import DropReason
from tests.support.options import FLAGS, named
from tests.support.source import ROOT

DOCS = ROOT / "docs"
GUIDES = [DOCS / name for name in ("guide.md", "operate.md")]
#: What goes wrong, the last part of the guide.
TEXT = GUIDES[0].read_text().partition("\n## What goes wrong\n")[2]
#: Of other commands: of ours, and of torchrun, docker, sbatch.
OTHER_FLAGS = {
    "--arrivals", "--config", "--interval", "--once", "--recommend", "--steps", "--strategy",
    "--trainer-load", "--cost-error", "--json", "--plans", "--run",
    "--max-restarts", "--max-split", "--nodes", "--nproc-per-node", "--pid", "--standalone",
    "--time",
}  # fmt: skip
QUOTED = [each for each in re.findall(r"`([^`\n]+)`", TEXT) if "..." in each]


@cache
def strings() -> tuple[str, ...]:
    """Every string in the source; what is put in by a format is an ellipsis."""
    files = [*(ROOT / "dispatcher").rglob("*.py"), *(ROOT / "workers").rglob("*.py")]
    return tuple(text for path in files for text in _strings(path))


def _strings(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = (
                part.value if isinstance(part, ast.Constant) else "..." for part in node.values
            )
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.sub(r"%[sdg]|%\.\d+f", "...", node.value))
    return found


def is_said(message: str) -> bool:
    """Whether the pieces of a message stand in this order in a string of the source."""
    pieces = [re.escape(piece.strip()) for piece in message.split("...") if piece.strip()]
    pattern = re.compile(".*".join(pieces), re.DOTALL)
    return any(pattern.search(text) for text in strings())


@pytest.mark.parametrize("message", QUOTED)
def test_a_message_that_is_quoted_is_said_by_the_code(message: str) -> None:
    assert is_said(message)


def test_what_nobody_says_is_noticed() -> None:
    assert not is_said("... ranks have gone for a walk ...")
    assert len(QUOTED) > 20


def test_errors_that_are_named_exist() -> None:
    named = set(re.findall(r"`([A-Z]\w+)`", TEXT)) - {
        "RANK",
        "DataLoader",
        "StreamDataset",
        "Retry-After",
    }
    named = {name for name in named if not name.isupper() and "_" not in name}
    assert {"StepContractError", "GenerationFenced", "RunChanged"} <= named
    assert [name for name in named if not hasattr(errors, name)] == []


def test_every_reason_to_drop_a_sample_is_explained() -> None:
    section = TEXT[TEXT.index("### Samples were dropped") : TEXT.index("### The loss is wrong")]
    assert set(re.findall(r"^\| `([a-z-]+)`", section, re.MULTILINE)) == set(DropReason)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_flags_that_are_named_exist(guide: Path) -> None:
    assert named(guide.read_text()) <= FLAGS | OTHER_FLAGS


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_metrics_that_are_named_exist(guide: Path) -> None:
    shown = set(
        re.findall(
            r"^\| `(dispatcher_\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE
        )
    )
    assert set(re.findall(r"\bdispatcher_[a-z_]+\b(?!\.py)", guide.read_text())) <= shown
