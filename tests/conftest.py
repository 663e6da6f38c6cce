"""What all tests share: tools that may be absent, and property tests without a stopwatch."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.slow import function_of, listed
from tests.support.certificates import Authority, write_token
from tests.support.examples import scaled
from tests.support.source import ROOT

# Machines that run tests are busy: how long an example took says nothing about the code.
settings.register_profile("dispatcher", deadline=None, max_examples=scaled(100))
settings.load_profile("dispatcher")

#: Debian's packages of tools that are called otherwise.
PACKAGES = {"promtool": "prometheus", "systemd-analyze": "systemd"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what takes long, see tests/slow.py."""
    slow = listed()
    for item in items:
        if function_of(item.nodeid) in slow:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _hangups_are_heeded() -> None:
    """Processes that tests start have SIGHUP as a terminal gives it, under `nohup make test` too.

    What is ignored stays ignored in a process that is started, even in one that a forkserver forks
    later; what is handled is not. And nobody but the tests' own process is kept alive by this.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture(scope="session", autouse=True)
def _nothing_of_torchrun_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whoever starts torchrun says where its logs go: by default they stay for good."""
    place = tmp_path_factory.mktemp("common")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(place))  # for the processes that tests start
        yield
    left = [path.name for path in place.glob("torchelastic_*")]
    assert not left, f"started without --log-dir: {left}"


@pytest.fixture(scope="session")
def tool() -> Callable[[str], str]:
    """`tool("promtool")`: its path; skips without it, or fails where CI says it must be there."""

    def find(name: str) -> str:
        path = shutil.which(name)
        if path is None:
            package = PACKAGES.get(name, name)
            message = f"{name} is not installed (Debian: apt-get install {package})"
            if os.environ.get("DISPATCHER_REQUIRE_TOOLS") == "1":
                pytest.fail(f"{message}, and DISPATCHER_REQUIRE_TOOLS=1 says it must be")
            pytest.skip(message)
        return path

    return find


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `token`, `server.pem` and `server.key`, as the README names them."""
    folder = tmp_path_factory.mktemp("secrets")
    pair = Authority(folder).issue("server")
    pair.certificate.rename(folder / "server.pem")
    pair.key.rename(folder / "server.key")
    write_token(folder / "token")
    return folder


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT
