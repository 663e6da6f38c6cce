"""A payload store in a directory of the test's own."""

from pathlib import Path

import pytest

from rollout_workers.stores.file import FileStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where its files are."""
    found = tmp_path / "payloads"
    found.mkdir()
    return found


@pytest.fixture
def store(root: Path) -> FileStore:
    """The store there."""
    return FileStore.open(f"file://{root}")
