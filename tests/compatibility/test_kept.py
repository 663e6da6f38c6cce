"""What an earlier release has written is read, and its clients are served: see `record.py`."""

import json
import re
import socket
import tarfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from tests.compatibility.record import HERE, PREFIX, SERVED, names, read_frame
from tests.support.server import PATIENCE_S, ServeProcess
from tests.support.source import ROOT

RELEASES = sorted(folder.name for folder in HERE.iterdir())
#: Said unasked, or in answer to time that passes.
UNASKED = {m.Feedback.type_code, m.Advice.type_code, m.Ping.type_code, m.Pong.type_code}
#: What each run has of its own; a client says it again.
OF_RUN = {"run_id", "digest"}
#: What the dispatcher may choose otherwise.
CHOSEN = {"heartbeat_interval_s", "credits", "max_payload_bytes", "max_open_steps"}
#: Where the trainer is, which comes with whatever is said next.
PROGRESS = m.Feedback.model_fields.keys()


def kept(release: str, title: str) -> list[tuple[str, str, bytes]]:
    """Who said what, frame by frame."""
    lines = json.loads((HERE / release / "conversations.json").read_text())[title]
    return [(role, side, bytes.fromhex(frame)) for role, side, frame in lines]


def parsed(frame: bytes) -> tuple[int, dict[str, Any], bytes]:
    """Code, header and payload."""
    _, code, size, _ = PREFIX.unpack_from(frame)
    stop = PREFIX.size + size
    return code, json.loads(frame[PREFIX.size : stop]), frame[stop:]


class Replay:
    """The clients of a conversation, in front of a dispatcher of today."""

    def __init__(self, server: ServeProcess, stack: ExitStack) -> None:
        at = Endpoint.parse(server.endpoint)
        self._lines = {
            role: stack.enter_context(socket.create_connection((at.host, at.port), PATIENCE_S))
            for role in ("producer", "rank")
        }
        self._of_run: dict[bytes, bytes] = {}

    def say(self, role: str, frame: bytes) -> None:
        """As it was said, but for what the run has of its own."""
        for before, now in self._of_run.items():
            frame = frame.replace(before, now)
        with suppress(OSError):  # a goodbye may find the dispatcher gone
            self._lines[role].sendall(frame)

    def hear(self, role: str, frame: bytes) -> None:
        """The next answer is the one that was heard."""
        code, expected, payload = parsed(frame)
        if code in UNASKED:
            return
        while True:
            found, header, data = parsed(read_frame(self._lines[role]))
            if found not in UNASKED:
                break
        assert (found, data) == (code, payload), header
        assert header.keys() ^ expected.keys() <= PROGRESS, (
            "a client of before refuses what it does not know"
        )
        for key in OF_RUN & expected.keys():
            self._of_run[expected[key].encode()] = header[key].encode()
        free = OF_RUN | CHOSEN | PROGRESS
        assert {k: v for k, v in header.items() if k not in free} == {
            k: v for k, v in expected.items() if k not in free
        }


def replay(server: ServeProcess, conversation: Sequence[tuple[str, str, bytes]]) -> None:
    with ExitStack() as stack:
        clients = Replay(server, stack)
        for role, side, frame in conversation:
            (clients.say if side == "client" else clients.hear)(role, frame)


@pytest.mark.parametrize("release", RELEASES)
def test_its_clients_are_served(release: str, tmp_path: Path) -> None:
    with ServeProcess(tmp_path, warm=True, journal_dir=tmp_path / "journal", **SERVED) as server:
        replay(server, kept(release, "begin"))
        server.await_status(samples_committed=2)


@pytest.mark.parametrize("release", RELEASES)
def test_its_journal_is_gone_on_with(release: str, tmp_path: Path) -> None:
    with tarfile.open(HERE / release / "journal.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    with ServeProcess(tmp_path, warm=True, journal_dir=tmp_path / "journal", **SERVED) as server:
        status = server.status()
        assert (status["samples_committed"], status["accepted"], status["balanced"]) == (2, 4, True)
        replay(server, kept(release, "finish"))
        assert server.wait() == 0


def test_an_answer_with_a_key_more_is_noticed(tmp_path: Path) -> None:
    conversation = kept(RELEASES[-1], "begin")
    role, side, frame = conversation[1]
    header = json.dumps(parsed(frame)[1] | {"later": 1}).encode()
    conversation[1] = role, side, PREFIX.pack(b"RD", frame[2], len(header), 0) + header
    with (
        ServeProcess(tmp_path, warm=True, **SERVED) as server,
        pytest.raises(AssertionError, match="does not know"),
    ):
        replay(server, conversation)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("kind", ["metrics", "options"])
def test_what_is_named_otherwise_or_gone_is_in_the_changelog(release: str, kind: str) -> None:
    before = json.loads((HERE / release / "names.json").read_text())[kind]
    assert changed(before, names()[kind]) - since(release) == set()


def changed(before: Any, now: Any) -> set[str]:
    """Names that are missing, or of another type."""
    if isinstance(before, list):
        return set(before) - set(now)
    return {name for name, kind in before.items() if now.get(name) != kind}


def since(release: str) -> set[str]:
    """Names in the changelog above a release; an option as its flag or key, a counter's too."""
    text = (ROOT / "CHANGELOG.md").read_text().partition(f"\n## [{release}]")[0]
    found = {name.removeprefix("--").replace("-", "_") for name in re.findall(r"[\w-]+", text)}
    return found | {name.removesuffix("_total").removesuffix("_info") for name in found}


def test_a_metric_of_another_type_and_a_missing_option_are_noticed() -> None:
    assert changed({"a": "gauge", "b": "gauge"}, {"a": "counter", "b": "gauge"}) == {"a"}
    assert changed(["window", "max_wait"], ["window"]) == {"max_wait"}
