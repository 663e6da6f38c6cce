"""Unix sockets: errors say which path, and who listens is left alone however busy it is."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.transport.sockets import connect, listening_socket
from tests.transport.test_plain import Recorder


@pytest.mark.parametrize("name", ["nowhere/socket", "x" * 120])
def test_a_path_that_cannot_be_is_named(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    with pytest.raises(OSError, match=name), listening_socket(Endpoint(path=path)):
        pass


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Endpoint]:
    """Where as many wait to be accepted as may."""
    path = tmp_path / "busy"
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(0)
        with suppress(BlockingIOError):
            while True:
                waits = stack.enter_context(socket.socket(socket.AF_UNIX))
                waits.setblocking(False)
                waits.connect(str(path))
        yield Endpoint(path=str(path))


def test_who_listens_and_has_no_time_is_told_from_who_is_dead(busy: Endpoint) -> None:
    told = pytest.raises(OSError, match=r"another process listens there.*busy")
    with told, listening_socket(busy):
        pass
    assert Path(busy.path).is_socket()


def test_a_socket_that_a_killed_process_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "left"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with listening_socket(Endpoint(path=str(path))), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_the_socket_of_a_successor_stays(tmp_path: Path) -> None:
    path = tmp_path / "ours"
    with socket.socket(socket.AF_UNIX) as successor:
        with listening_socket(Endpoint(path=str(path))):
            path.unlink()
            successor.bind(str(path))
        assert path.exists()


async def test_a_client_that_finds_no_place_in_line_is_not_connected(busy: Endpoint) -> None:
    with pytest.raises(ConnectionError, match="busy already as may"):
        await connect(busy, Recorder(), None)
