"""A scripted dispatcher and a payload store; and no thread of ours left behind."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_workers.stores.file import FileStore
from tests.workers.support.peers import ScriptedDispatcher
from tests.workers.support.stored import make_store


@pytest.fixture
def dispatcher(tmp_path: Path) -> Iterator[ScriptedDispatcher]:
    scripted = ScriptedDispatcher(tmp_path / "sample.sock")
    yield scripted
    scripted.end()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the store's files are."""
    return tmp_path / "payloads"


@pytest.fixture
def store(root: Path) -> FileStore:
    """A payload store in a directory of the test's own."""
    return make_store(f"file://{root}")


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not left & {"dispatcher-rank", "rollout-producer"}
