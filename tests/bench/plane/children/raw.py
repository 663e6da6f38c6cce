"""The floors: bytes through blocking sockets and nothing else.

    python -m tests.bench.plane.children.raw '{"role": "sender", ...}'

A sender writes contiguous buffers of the size of a micro-batch, in turn for either receiver. The
relay reads them into one large buffer, at most a mebibyte at a time, and sends them on; without a
relay the sender has both receivers for itself. Receivers read into a buffer that they use again.
Nothing is decoded, kept, checked or acknowledged: what moves the same bytes with less than this
does not use sockets.
"""

import socket
import time
from collections.abc import Iterator

from tests.bench.plane.children.children import Answer, answer, arguments, obey
from tests.bench.plane.load.loads import Load, find

CHUNK = 1 << 20
RECEIVERS = 2


def units(load: Load, steps: int) -> list[int]:
    """Bytes of each buffer of one run, micro-batch by micro-batch."""
    found = []
    for first in range(0, steps * load.batch, load.micro_batch):
        members = [(first + at) % load.pool for at in range(load.micro_batch)]
        found.append(int(load.nbytes[members].sum()))
    return found


def pieces(nbytes: int) -> Iterator[int]:
    """A buffer's bytes in chunks."""
    for start in range(0, nbytes, CHUNK):
        yield min(CHUNK, nbytes - start)


def serve_sender(load: Load, ports: list[int]) -> None:
    """Connect to a relay or to both receivers; send a run when told."""
    peers = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    sizes = units(load, load.steps)
    period = max(1, load.pool // load.micro_batch)
    pool = [memoryview(bytes([at % 251]) * size) for at, size in enumerate(sizes[:period])]

    def run(order: Answer) -> Answer:
        began = time.monotonic()
        for at in range(len(sizes)):
            peers[at % len(peers)].sendall(pool[at % period])
        return {"began": began}

    answer(ready=True)
    obey({"run": run})


def serve_relay(load: Load, ports: list[int]) -> None:
    """Accept one sender, connect to the receivers, and pass on until the sender is gone."""
    peers = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    listener = socket.create_server(("127.0.0.1", 0))
    answer(port=listener.getsockname()[1])
    source, _ = listener.accept()
    buffer = memoryview(bytearray(max(CHUNK, *units(load, 1))))
    sizes = units(load, load.steps)
    while True:
        for at, size in enumerate(sizes):
            target = peers[at % len(peers)]
            for piece in pieces(size):
                if source.recv_into(buffer[:piece], piece, socket.MSG_WAITALL) < piece:
                    return
                target.sendall(buffer[:piece])


def serve_receiver(load: Load, place: int) -> None:
    """Accept one connection; when told, say when a run's bytes were all here."""
    listener = socket.create_server(("127.0.0.1", 0))
    answer(port=listener.getsockname()[1])
    source, _ = listener.accept()
    sizes = units(load, load.steps)[place::RECEIVERS]
    buffer = bytearray(max(CHUNK, *sizes))

    def run(order: Answer) -> Answer:
        left = sum(sizes)
        while left:
            got = source.recv_into(buffer, min(CHUNK, left))
            if not got:
                raise EOFError("the sender is gone")
            left -= got
        return {"ended": time.monotonic()}

    obey({"run": run})


def main() -> None:
    """Play the role that the arguments say."""
    given = arguments()
    load = find(given)
    match given["role"]:
        case "sender":
            serve_sender(load, given["ports"])
        case "relay":
            serve_relay(load, given["ports"])
        case "receiver":
            serve_receiver(load, given["place"])


if __name__ == "__main__":
    main()
