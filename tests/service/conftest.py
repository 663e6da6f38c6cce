"""Servers for the service's tests: one a test, or one a module with witnesses on it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.references import STORE
from tests.support.server import ServeProcess

Serve = Callable[..., ServeProcess]

#: Two ranks, four samples a step, and no choice: whatever four samples come are the next step.
SMALL: dict[str, Any] = {
    "dp_size": 2,
    "global_batch_size": 4,
    "window": 1,
    "micro_batch_tokens": 64,
    "max_wait": "10ms",
}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """`serve(**options)`: a running dispatcher, SMALL unless told otherwise, ended afterwards."""
    with ExitStack() as stack:

        def start(**options: object) -> ServeProcess:
            settings: dict[str, Any] = {"warm": True, **SMALL, **options}
            if "micro_batch_size" in options:
                del settings["micro_batch_tokens"]
            return stack.enter_context(ServeProcess(tmp_path, **settings))

        yield start


@pytest.fixture
def start(serve: Serve, tmp_path: Path) -> Serve:
    """`start(**options)`: a dispatcher with a payload store, on the journal of the one before."""
    return partial(
        serve,
        micro_batch_size=2,
        payload_stores=STORE,
        journal_dir=tmp_path / "journal",
        sample_retention="commit",
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """One dispatcher for all tests of a module, with small limits."""
    folder = tmp_path_factory.mktemp("shared")
    with ServeProcess(folder, warm=True, **SMALL, max_frame_bytes="64KiB") as server:
        yield server
