"""A payload store in a directory of the test's own."""

from pathlib import Path

import pytest

from rollout_workers.stores.file import FileStore


def make_store(address: str) -> FileStore:
    """A store in a new directory."""
    Path(address.removeprefix("file://")).mkdir()
    return FileStore.open(address)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where its files are."""
    return tmp_path / "payloads"


@pytest.fixture
def store(root: Path) -> FileStore:
    """The store there."""
    return make_store(f"file://{root}")
