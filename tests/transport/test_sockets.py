"""Unix sockets: errors say which path, and who listens is left alone however busy it is."""

import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.transport.sockets import listening_socket


@pytest.mark.parametrize("name", ["nowhere/socket", "x" * 120])
def test_a_path_that_cannot_be_is_named(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    with pytest.raises(OSError, match=name), listening_socket(Endpoint(path=path)):
        pass


def test_who_listens_and_has_no_time_is_told_from_who_is_dead(tmp_path: Path) -> None:
    path = tmp_path / "busy"
    with ExitStack() as stack:
        busy = stack.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(str(path))
        busy.listen(0)
        with suppress(BlockingIOError):
            while True:  # until as many wait as may
                waits = stack.enter_context(socket.socket(socket.AF_UNIX))
                waits.setblocking(False)
                waits.connect(str(path))
        with (
            pytest.raises(OSError, match=r"another process listens there.*busy"),
            listening_socket(Endpoint(path=str(path))),
        ):
            pass
        assert path.is_socket()
