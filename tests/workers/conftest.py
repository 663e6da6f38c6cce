"""A scripted dispatcher and helping threads; and no thread of ours left behind."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.workers.support.peers import ScriptedDispatcher


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def dispatcher(tmp_path: Path) -> Iterator[ScriptedDispatcher]:
    scripted = ScriptedDispatcher(tmp_path / "sample.sock")
    yield scripted
    scripted.hang_up()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not left & {"dispatcher-rank", "rollout-producer"}
