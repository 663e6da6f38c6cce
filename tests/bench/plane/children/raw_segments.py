"""The floor of shared memory: sealed segments through Unix sockets, and nothing else.

    python -m tests.bench.plane.children.raw_segments '{"role": "sender", ...}'

A sender writes the bytes of a push into a segment, seals it and passes its descriptor on. The relay
hands it to either receiver in turn, which reads it into a buffer that it uses again. Nothing is
decoded, kept, checked, mapped or acknowledged, and Python runs once a push: what passes sealed
memory on costs at least this. A few segments are under way at a time, so that few pages are.
"""

import os
import socket
import time

from rollout_dispatcher.transport.shared_memory.segments import write_segment
from tests.bench.plane.children.children import Answer, answer, arguments, obey
from tests.bench.plane.children.raw import RECEIVERS
from tests.bench.plane.load.loads import Load, find


def pushes(load: Load, steps: int) -> list[int]:
    """Bytes of each push of so many steps."""
    found = []
    for first in range(0, steps * load.batch, load.push):
        members = [(first + at) % load.pool for at in range(load.push)]
        found.append(int(load.nbytes[members].sum()))
    return found


def listen(path: str) -> socket.socket:
    """A listener there."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    return listener


def connect(path: str) -> socket.socket:
    """A connection that holds a few descriptors, as it takes few bytes."""
    found = socket.socket(socket.AF_UNIX)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)
    found.connect(path)
    return found


def take(source: socket.socket) -> int | None:
    """The next descriptor; None if the other side is gone."""
    _, descriptors, _, _ = socket.recv_fds(source, 1, 1)
    return descriptors[0] if descriptors else None


def serve_sender(load: Load, path: str) -> None:
    """Connect to the relay; send a run when told."""
    relay = connect(path)
    sizes = pushes(load, load.steps)
    period = max(1, load.pool // load.push)
    pool = [bytes([at % 251]) * size for at, size in enumerate(sizes[:period])]

    def run(order: Answer) -> Answer:
        began = time.monotonic()
        for at in range(len(sizes)):
            descriptor = write_segment([pool[at % period]])
            socket.send_fds(relay, [b"."], [descriptor])
            os.close(descriptor)
        return {"began": began}

    answer(ready=True)
    obey({"run": run})


def serve_relay(path: str, receivers: list[str]) -> None:
    """Accept one sender, connect to the receivers, and pass on until the sender is gone."""
    peers = [connect(at) for at in receivers]
    listener = listen(path)
    answer(ready=True)
    source, _ = listener.accept()
    turn = 0
    while (descriptor := take(source)) is not None:
        socket.send_fds(peers[turn], [b"."], [descriptor])
        os.close(descriptor)
        turn = (turn + 1) % len(peers)


def serve_receiver(load: Load, path: str, place: int) -> None:
    """Accept the relay; when told, say when a run's bytes were all here."""
    listener = listen(path)
    answer(ready=True)
    source, _ = listener.accept()
    sizes = pushes(load, load.steps)[place::RECEIVERS]
    buffer = memoryview(bytearray(max(sizes)))

    def run(order: Answer) -> Answer:
        for size in sizes:
            descriptor = take(source)
            if descriptor is None:
                raise EOFError("the relay is gone")
            if os.preadv(descriptor, [buffer[:size]], 0) < size:
                raise EOFError("a segment is shorter than was sent")
            os.close(descriptor)
        return {"ended": time.monotonic()}

    obey({"run": run})


def main() -> None:
    """Play the role that the arguments say."""
    given = arguments()
    match given["role"]:
        case "sender":
            serve_sender(find(given), given["path"])
        case "relay":
            serve_relay(given["path"], given["receivers"])
        case "receiver":
            serve_receiver(find(given), given["path"], given["place"])


if __name__ == "__main__":
    main()
