"""What tests of the live view need, and where it may be lacking."""

import os
import shutil

import pytest


@pytest.fixture(scope="session")
def tmux() -> str:
    """The path of tmux; skips without it, or fails where it must be there."""
    if (path := shutil.which("tmux")) is not None:
        return path
    what = "tmux (Debian: apt-get install tmux)"
    if os.environ.get("DISPATCHER_REQUIRE_TOOLS") == "1":
        pytest.fail(f"{what} is not installed, and DISPATCHER_REQUIRE_TOOLS=1 says it must be")
    pytest.skip(f"{what} is not installed, so the live view is not tested")
