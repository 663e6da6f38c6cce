"""What tests of the live view need, and where it may be lacking."""

import os
import shutil
from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session")
def tmux() -> str:
    """The path of tmux; skips without it or without rich, or fails where both must be there."""
    path = shutil.which("tmux")
    if path is not None and find_spec("rich") is not None:
        return path
    what = "rich (extra top)" if path else "tmux (Debian: apt-get install tmux)"
    if os.environ.get("DISPATCHER_REQUIRE_TOOLS") == "1":
        pytest.fail(f"{what} is not installed, and DISPATCHER_REQUIRE_TOOLS=1 says it must be")
    pytest.skip(f"{what} is not installed, so the live view is not tested")
