"""A running dispatcher that is sent anything, and a producer and ranks that do their work on it."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import FrameLimits, FrameReader
from rollout_dispatcher.protocol.sessions import Session, Side
from tests.chaos.cluster.processes import Process
from tests.fuzz.session import welcome
from tests.support.client import Producer, Trainer
from tests.support.options import arguments
from tests.support.references import STORE, make_references
from tests.support.server import eventually
from tests.support.wire.frames import feed

PATIENCE_S = 20.0
DP_SIZE = 2
GOOD, STORED = "good", "stored"
LIMITS = FrameLimits(header=4 << 20, payload=64 << 10)
KNOWN_CODES = {
    "protocol", "frame-too-large", "version", "rank-refused", "fenced", "connection-limit",
    "made-room", "too-slow", "unauthorized",
}  # fmt: skip


class Arena:
    """One dispatcher; `attack` sends it one connection's worth of bytes.

    references: whether it takes payloads by reference.
    """

    def __init__(self, folder: Path, bug: str = "none", *, references: bool = False) -> None:
        self._folder, self._path = folder, str(folder / "sample.sock")
        options = {
            "listen": f"unix:{self._path}",
            "http": f"unix:{folder}/http.sock",
            "ready-file": folder / "ready.json",
            "dp-size": DP_SIZE,
            "global-batch-size": 4,
            "window": 1,
            "micro-batch-tokens": 64,
            "max-wait": "10ms",
            "group-timeout": "200ms",
            "max-frame-bytes": f"{LIMITS.payload}B",
        }
        if references:
            options |= {
                "payload-stores": STORE,
                "journal-dir": folder / "journal",
                "sample_retention": "commit",
            }
        self._process = Process(
            ["tests.fuzz.planted", bug, "serve", *arguments(options)], folder / "dispatcher.log"
        )
        self.attacks = 0
        self.codes: dict[str, int] = {}
        eventually(self._is_up, "the dispatcher is ready")

    def _is_up(self) -> bool:
        assert self._process.code is None, self.log
        return (self._folder / "ready.json").exists()

    @property
    def endpoint(self) -> str:
        """Of the sample plane."""
        return f"unix:{self._path}"

    @property
    def http(self) -> str:
        """The path of the HTTP plane's socket."""
        return f"{self._folder}/http.sock"

    @property
    def log(self) -> str:
        """What it has written so far."""
        return (self._folder / "dispatcher.log").read_text(errors="replace")

    @property
    def resident(self) -> int:
        """Bytes of memory that the dispatcher holds."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def attack(self, stream: bytes) -> None:
        """Send it on a connection of its own, and read until the dispatcher hangs up."""
        self.attacks += 1
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(self._path)
            with suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(stream)
                sock.shutdown(socket.SHUT_WR)
            reader = FrameReader(FrameLimits(1 << 26, 1 << 26))
            with suppress(ConnectionResetError):
                while data := sock.recv(65536):
                    for frame in feed(reader, data):
                        self._heard(codec.decode(frame))

    def _heard(self, message: m.Message) -> None:
        if isinstance(message, m.Error):
            assert message.code in KNOWN_CODES, message
            self.codes[message.code] = self.codes.get(message.code, 0) + 1

    def status(self) -> dict[str, object]:
        """What /statusz says."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(self.http)
            sock.sendall(b"GET /statusz HTTP/1.0\r\n\r\n")
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
        found: dict[str, object] = json.loads(answer.split(b"\r\n\r\n", 1)[1])
        return found

    def close(self) -> None:
        """End it; fails if it ended by itself or complained."""
        code = self._process.code
        self._process.kill()
        assert code is None, f"the dispatcher ended with {code}"
        log = self.log
        assert "Traceback" not in log, log[log.index("Traceback") :][:2000]


class Work:
    """A producer and ranks that must not notice any of it."""

    def __init__(self, arena: Arena) -> None:
        self._endpoint = arena.endpoint
        self._producer = Producer(arena.endpoint, GOOD)
        self._trainer = Trainer(arena.endpoint, DP_SIZE, opens_stores=True)
        self._failure: BaseException | None = None
        self.trained: list[str] = []
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def push_references(self) -> None:
        """Samples that lie in a store, to be released once trained; their producer leaves."""
        with Producer(self._endpoint, STORED, opens_stores=True) as producer:
            producer.send(*make_references(STORED, 0, [3, 4, 5, 6]))
            producer.expect(m.Pushed)

    def go_on(self) -> None:
        """Samples are pushed, and the first four of them trained; what others pushed may be ahead.

        So the last of them may have to wait for company.
        """
        first = self._producer.next_seq
        answer = self._producer.push([3, 4, 5, 6] * 2)
        assert answer.outcomes == ["accepted"] * 8, answer
        mine = {f"{GOOD}/{first + at}" for at in range(4)}
        eventually(lambda: self._failure or mine <= set(self.trained[-4096:]), "good samples train")
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        """End the stream and leave."""
        self._producer.end_stream(
            force=True
        )  # others who contributed were cut off, and say nothing
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the ranks got no end"
        if self._failure is not None:
            raise self._failure
        mine = [name for name in self.trained if name.startswith(f"{GOOD}/")]
        assert len(set(mine)) == len(mine) == self._producer.next_seq, "lost, or trained twice"

    def _train(self) -> None:
        try:
            while parts := self._trainer.train():
                self.trained += [name for part in parts for name in part.sample_ids]
                for rank in self._trainer.ranks:
                    rank.steps = {n: s for n, s in rank.steps.items() if n > rank.committed}
        except BaseException as error:
            self._failure = error


@contextmanager
def arena(folder: Path, bug: str = "none", *, references: bool = False) -> Iterator[Arena]:
    """An arena that is closed in the end, whatever happens in it."""
    found = Arena(folder, bug, references=references)
    try:
        yield found
    except BaseException:
        with suppress(AssertionError):
            found.close()
        raise
    found.close()


def is_harmless(stream: bytes, *, rank: bool) -> bool:
    """Whether a peer that says this asks for nothing that it may have and others would feel.

    Whoever may connect may end the stream or a phase, speak for another client, and begin a new
    generation; the last one is wanted where the peer is a `rank`, the others nowhere.
    """
    session = Session(Side.DISPATCHER, LIMITS)
    try:
        for message in _messages(session, stream):
            match message:
                case m.EndStream() | m.EndPhase():
                    return False
                case m.HelloProducer() if message.client_id in (GOOD, STORED):
                    return False
                case m.HelloRank() if message.generation is None and not rank:
                    return False
    except ProtocolError:
        pass
    return True


def _messages(session: Session, stream: bytes) -> Iterator[m.Message]:
    while stream:
        target = session.get_buffer()
        taken = min(len(target), len(stream))
        target[:taken] = stream[:taken]
        stream = stream[taken:]
        for message, _ in session.received(taken):
            welcome(session, message)
            yield message
