"""Signals are heard whatever hangs, and only those that end something end anything."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.service.conftest import SMALL, Serve
from tests.support.client import Producer, Trainer
from tests.support.options import arguments
from tests.support.server import PATIENCE_S, ServeProcess, eventually

#: Far more than any of these ends may take, and less than what they do not wait for.
AT_ONCE_S = 15.0

Stuck = Callable[..., ServeProcess]


@pytest.fixture
def stuck(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stuck:
    """The command with a journal, whose disk hangs once the file `stuck` is there."""
    monkeypatch.setenv("STUCK", str(tmp_path / "stuck"))
    options = {"journal_dir": tmp_path / "journal", "drain_timeout": "10m"}
    return partial(serve, warm=False, module="tests.service.stuck_disk", **options)


@contextlib.contextmanager
def started(
    *wrapped: str, module: str = "rollout_dispatcher.cli.main", stderr: int, **options: object
) -> Iterator[subprocess.Popen[bytes]]:
    """The command, whoever reads its log; it may be ready later, or never."""
    flags = arguments({**SMALL, "listen": "127.0.0.1:0", "http": "127.0.0.1:0", **options})
    command = [*wrapped, sys.executable, "-m", module, "serve", *flags]
    with subprocess.Popen(command, stderr=stderr, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def logged(server: ServeProcess, said: str) -> bool:
    return said in server.log()


def fill(pipe: int) -> None:
    """Write to it until it takes nothing more; whoever else writes to it waits then."""
    writer = os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK)
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b" " * size)
    os.close(writer)


def test_the_second_signal_quits_though_the_journals_disk_hangs(
    stuck: Stuck, tmp_path: Path
) -> None:
    server = stuck()
    producer = Producer(server.endpoint, "p")
    producer.push([3])
    (tmp_path / "stuck").touch()
    producer.send_push([4])
    server.await_status(buffered=2)  # and not answered
    server.send_signal(signal.SIGTERM)
    eventually(lambda: "a second signal quits at once" in server.log(), "the first is heard")
    server.send_signal(signal.SIGTERM)
    assert server.wait(AT_ONCE_S) == 1
    assert "the journal could not be written: its disk does not answer" in server.log()


def test_a_journal_that_breaks_while_it_is_closed_is_told_and_fails_the_process(
    stuck: Stuck, tmp_path: Path
) -> None:
    server = stuck(journal_sync="off")
    Producer(server.endpoint, "p").push([3])
    (tmp_path / "stuck").write_text("broken")
    server.send_signal(signal.SIGTERM)
    assert server.wait() == 1
    assert "the journal was not closed in order: cannot sync" in server.log()
    assert "dispatcher serve: cannot sync" in server.log()


def test_a_log_that_nobody_reads_does_not_keep_the_process(tmp_path: Path) -> None:
    """Who logs waits in the kernel then, and that is the event loop's thread."""
    log, stderr = os.pipe()
    ready = tmp_path / "ready"
    with started(stderr=stderr, ready_file=ready) as process:
        eventually(ready.exists, "it is ready")
        fill(stderr)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert process.wait(AT_ONCE_S) == 1
    os.close(log)
    os.close(stderr)


def test_a_signal_is_heard_while_the_journal_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, stuck = tmp_path / "journal", tmp_path / "stuck"
    journal.mkdir()
    stuck.touch()
    monkeypatch.setenv("STUCK", str(stuck))
    module = "tests.service.stuck_disk"
    with started(module=module, stderr=subprocess.PIPE, journal_dir=journal) as process:
        eventually((journal / "lock").exists, "the journal is being opened")
        assert process.stderr is not None
        process.send_signal(signal.SIGUSR1)
        # Of two signals that wait for a process the later one is often handled first.
        assert any(b"SIGUSR1: the journal is still being read" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        assert process.wait(AT_ONCE_S) == 0
        log = process.stderr.read().decode()
    assert "SIGTERM: stopped before anything was accepted" in log


def test_what_ends_nothing_is_logged_and_changes_nothing(serve: Serve) -> None:
    server = serve(warm=False)
    producer, trainer = Producer(server.endpoint, "p"), Trainer(server.endpoint, 2)
    producer.push([3, 4, 5])
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        server.send_signal(number)
        said = f"{number.name}: "
        eventually(partial(logged, server, said), f"{number} is heard")
    log = server.log()
    assert "SIGHUP: nothing changes" in log
    assert "is running: 3 samples buffered, 0 open steps with 0 samples, 0 steps committed" in log
    assert "2 of 2 DP ranks connected" in log
    producer.push([6])
    assert trainer.train()


def test_a_signal_that_is_ignored_already_stays_so(tmp_path: Path) -> None:
    """As `nohup` has it."""
    ready = tmp_path / "ready"
    with started("nohup", stderr=subprocess.PIPE, ready_file=ready) as process:
        eventually(ready.exists, "it is ready")
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr is not None
        assert b"SIGHUP" not in process.stderr.read()
