"""`dispatcher gc`: frees what nobody needs, of a real store and a real run, and nothing else."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

from rollout_dispatcher.cli.main import main
from rollout_workers import RankClient, RolloutProducer
from rollout_workers.stores.file import FileStore
from tests.support.addresses import free_address
from tests.support.server import ServeProcess

#: A producer with an object that nobody has heard of; it goes on to push it when it is told to.
BETWEEN_PUT_AND_PUSH = """
import sys
import numpy as np
from rollout_workers import RolloutProducer
from rollout_workers.stores.file import FileStore

def put(self, key, spans, whole=FileStore.put):
    stored = whole(self, key, spans)
    print(key, flush=True)
    sys.stdin.readline()
    return stored

FileStore.put = put
with RolloutProducer(sys.argv[1]) as producer:
    producer.push({"input_ids": np.arange(10_000)})
    producer.end_stream()
"""
#: A store of somebody else's, which cannot release what is stuck.
STUCK = """
from rollout_workers.stores.interface import PayloadStore

class Stuck(PayloadStore):
    scheme = "stuck"
    open = classmethod(lambda cls, address: cls())
    put = get = close = None
    def list(self, prefix):
        return [key for key in ("p.00000000/0", "p.00000000/1") if key.startswith(prefix)]
    def release(self, keys):
        return [key for key in keys if key.endswith("1")]

Stuck.__abstractmethods__ = frozenset()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "payloads").mkdir()
    return tmp_path / "payloads"


def serve(folder: Path, store: str, **options: Any) -> ServeProcess:
    """A dispatcher of a new run, whose producers put everything there."""
    folder.mkdir()
    return ServeProcess(
        folder, warm=True, dp_size=1, global_batch_size=1, micro_batch_tokens=20_000,
        payload_stores=store, inline_limit="1KiB", journal_dir=folder / "journal",
        sample_retention="commit", **options,
    )  # fmt: skip


@contextmanager
def producer_between_put_and_push(address: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """It, and the key of its object; killed in the end."""
    command = [sys.executable, "-c", BETWEEN_PUT_AND_PUSH, address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as producer:
        try:
            assert producer.stdout
            yield producer, producer.stdout.readline().strip()
        finally:
            producer.kill()


def keys(root: Path) -> list[str]:
    return FileStore.open(f"file://{root}").list("")


def put(root: Path, *names: str) -> list[str]:
    for name in names:
        FileStore.open(f"file://{root}").put(name, [b"x"])
    return list(names)


def collect(server: ServeProcess, *arguments: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """What a run that goes well says."""
    capsys.readouterr()
    assert main(["gc", "--http", server.http, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_an_earlier_run_has_left_goes_and_what_is_about_to_be_pushed_is_trained(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address, store = free_address(), f"file://{root}"
    with serve(tmp_path / "first", store, listen=address) as server:
        with producer_between_put_and_push(address) as (killed, orphan):
            killed.send_signal(SIGKILL)
            killed.wait()
            assert collect(server, store, capsys=capsys)["needed"] == 1, "it may be back any moment"
        server.send_signal(SIGKILL)
        server.wait()
    with (
        serve(tmp_path / "second", store, listen=address) as server,
        producer_between_put_and_push(address) as (alive, wanted),
    ):
        (theirs,) = put(root, "theirs/1")
        assert sorted(keys(root)) == sorted([orphan, wanted, theirs])
        looked = collect(server, store, "--dry-run", capsys=capsys)
        assert (looked["left_over"], looked["released"], len(keys(root))) == ([orphan], 0, 3)
        found = collect(server, store, capsys=capsys)
        assert (found["left_over"], found["released"]) == ([orphan], 1)
        assert (found["objects"], found["needed"], found["others"]) == (3, 1, 1)
        assert sorted(keys(root)) == sorted([wanted, theirs])
        assert collect(server, store, "--all", capsys=capsys)["left_over"] == [theirs]
        assert keys(root) == [wanted]
        alive.communicate("push it\n", timeout=20)
        with RankClient(address, dp_rank=0, dp_size=1) as client:
            while (step := client.next_step(20)) is not None:
                assert [batch.header.tokens for batch in step] == [[10_000]]
                step.commit()
        assert server.wait() == 0
    assert keys(root) == []


def test_nothing_is_freed_that_the_right_dispatcher_has_not_answered_for(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, token = f"file://{root}", tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    token.chmod(0o600)
    there = put(root, "p.00000000/0", "p.00000000/1", "q.00000000/0")
    with serve(tmp_path / "run", store, token_file=token) as server:
        ask = ["gc", store, "--http", server.http]
        shown = ["--token-file", str(token)]
        for arguments, told in (
            (["gc", store, "--http", free_address()], "refused"),
            (ask, "token"),
            ([*ask, *shown, "--run-id", "another"], "instead of another"),
            (["gc", f"{store}/", *ask[2:], *shown], f"--payload-stores: {store}"),
            (["gc", store, "--ready-file", str(tmp_path / "nowhere")], "cannot be read"),
        ):
            assert main(arguments) == 1
            assert told in capsys.readouterr().err
        assert keys(root) == there
        assert main([*ask, *shown, "--prefix", "p."]) == 0
        assert keys(root) == ["q.00000000/0"]
        told = capsys.readouterr().out
        assert 'left over: 2 ("p.00000000/0", "p.00000000/1")\nreleased: 2' in told
        for at in range(1100):  # more than is asked for at a time
            shutil.copy(root / "q.00000000" / "0", root / "q.00000000" / str(at + 1))
        assert len(keys(root)) == 1101
        assert main([*ask, *shown]) == 0
        assert "released: 1101" in capsys.readouterr().out
        root.rmdir()
        assert main([*ask, *shown]) == 1
        assert store in capsys.readouterr().err


def test_what_cannot_be_released_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    (tmp_path / "stuck-1.dist-info").mkdir()
    (tmp_path / "stuck-1.dist-info" / "entry_points.txt").write_text(
        "[rollout_dispatcher.payload_stores]\nstuck = stuck:Stuck\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with serve(tmp_path / "run", "stuck:there") as server:
        assert main(["gc", "stuck:there", "--http", server.http]) == 1
    assert 'released: 1\nstill there: 1 ("p.00000000/1")' in capsys.readouterr().out


def test_what_was_pushed_under_another_address_of_the_same_place_stays(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    with serve(tmp_path / "run", f"file://{root},file://{link}") as server:
        with RolloutProducer(server.endpoint) as producer:
            producer.push({"input_ids": range(10_000)})
        found = collect(server, f"file://{link}", "--all", capsys=capsys)
    assert (found["needed"], found["left_over"], len(keys(root))) == (1, [], 1)


def test_a_key_of_somebodys_own_that_begins_like_a_producers_stays(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = put(root, "job.20261123/17.safetensors", "job.20261123/17/0")
    put(root, "p.00000000/0", "p.00000000/1@0123abcd")
    with serve(tmp_path / "run", f"file://{root}") as server:
        found = collect(server, f"file://{root}", capsys=capsys)
    assert (found["others"], found["released"], keys(root)) == (2, 2, sorted(theirs))
