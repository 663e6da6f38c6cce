"""What a release leaves for the tests of later ones: a journal, what clients said, and names.

    python -m tests.compatibility.record    once, when a release is tagged; it has the host's name

The conversations are those of the release's own clients, frame by frame: one with a new dispatcher,
which is killed at its end, and one with the dispatcher that goes on with its journal. Names are
those of metrics and options.
"""

import json
import shutil
import socket
import struct
import tarfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from typing import Any

from rollout_dispatcher import __version__
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_workers import RankClient, RolloutProducer
from tests.support.options import OPTIONS
from tests.support.server import PATIENCE_S, ServeProcess
from tests.test_metrics_doc import families

HERE = Path(__file__).parent / "kept"
#: Of both dispatchers: steps of two samples, and four samples in all.
SERVED: dict[str, Any] = {
    "dp_size": 1,
    "global_batch_size": 2,
    "micro_batch_size": 1,
    "buffer_capacity": 4,
    "sample_retention": "commit",
}
SAMPLES = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]
#: As docs/protocol.md has it: magic, code, lengths of header and payload.
PREFIX = struct.Struct("<2sBxIQ")
#: Who said it to whom (`producer` or `rank`, `client` or `dispatcher`), and the frame.
Line = tuple[str, str, bytes]


def read_frame(connection: socket.socket) -> bytes:
    """The next frame, b"" once the other side has closed."""
    with suppress(ConnectionError):
        if start := connection.recv(PREFIX.size, socket.MSG_WAITALL):
            _, _, header, payload = PREFIX.unpack(start)
            return start + connection.recv(header + payload, socket.MSG_WAITALL)
    return b""


class Tap:
    """Stands between one client and the dispatcher, and notes every frame."""

    def __init__(self, role: str, dispatcher: str, lines: list[Line], lock: Lock) -> None:
        self._role, self._lines, self._lock = role, lines, lock
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        at = Endpoint.parse(dispatcher)
        self._dispatcher = at.host, at.port
        Thread(target=self._carry, daemon=True).start()

    def _carry(self) -> None:
        client, _ = self._listener.accept()
        dispatcher = socket.create_connection(self._dispatcher)
        back = Thread(target=self._pass, args=("dispatcher", dispatcher, client), daemon=True)
        back.start()
        self._pass("client", client, dispatcher)

    def _pass(self, side: str, source: socket.socket, target: socket.socket) -> None:
        while frame := read_frame(source):
            with self._lock, suppress(OSError):  # noted before it can be answered
                self._lines.append((self._role, side, frame))
                target.sendall(frame)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def converse(
    server: ServeProcess, talk: Callable[[RolloutProducer, RankClient], None]
) -> list[Line]:
    """What a producer and a rank say and hear while `talk` goes on."""
    lines: list[Line] = []
    lock = Lock()
    at = {role: Tap(role, server.endpoint, lines, lock).endpoint for role in ("producer", "rank")}
    with ExitStack() as clients:
        producer = clients.enter_context(RolloutProducer(at["producer"]))
        rank = clients.enter_context(RankClient(at["rank"], dp_rank=0, dp_size=1))
        talk(producer, rank)
    return lines


def train(rank: RankClient) -> None:
    """One step."""
    step = rank.next_step(PATIENCE_S)
    assert step is not None
    assert len(list(step)) == len(step)
    step.commit()


def begin(producer: RolloutProducer, rank: RankClient) -> None:
    """The first step; more samples come when nobody trains, so that there is one order to hear."""
    rollouts = [{"input_ids": ids} for ids in SAMPLES]
    producer.push_many(rollouts[:2])
    train(rank)
    rank.close()
    producer.push_many(rollouts[2:])


def finish(producer: RolloutProducer, rank: RankClient) -> None:
    """The second step, and the end."""
    train(rank)
    producer.end_stream(force=True)
    assert rank.next_step(PATIENCE_S) is None


def names() -> dict[str, Any]:
    """Metrics with their types, and options."""
    return {
        "metrics": dict(sorted((item.name, item.type) for item in families())),
        "options": sorted(OPTIONS),
    }


def main() -> None:
    """Write all of it into the folder of this release."""
    folder = HERE / __version__
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    found = {}
    with TemporaryDirectory() as name:
        journal = Path(name) / "journal"
        for title, talk in (("begin", begin), ("finish", finish)):
            with ServeProcess(Path(name), journal_dir=journal, **SERVED) as server:
                lines = converse(server, talk)
                if title == "begin":
                    server.await_status(samples_committed=2)
            found[title] = [[role, side, frame.hex()] for role, side, frame in lines]
            if title == "begin":
                with tarfile.open(folder / "journal.tar.xz", "w:xz") as tar:
                    tar.add(journal, "journal")
    text = ",\n".join(
        f'"{title}": [\n' + ",\n".join(map(json.dumps, lines)) + "\n]"
        for title, lines in found.items()
    )
    (folder / "conversations.json").write_text(f"{{\n{text}\n}}\n")
    (folder / "names.json").write_text(json.dumps(names(), indent=1) + "\n")


if __name__ == "__main__":
    main()
