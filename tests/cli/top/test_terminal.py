"""`dispatcher top` as an operator sees it: in a real terminal, beside a real run."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.addresses import free_address
from tests.support.certificates import Authority, write_token
from tests.support.server import ServeProcess, eventually
from tests.support.slow_rank import OPTIONS, RANKS, SLOW, SlowRankRun
from tests.support.terminal import PROMPT, Terminal

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

STTY = "stty -a | grep -o -E -e '-?(icanon|echo) ' | tr -d '\\n'; echo ends"


def command(address: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "rollout_dispatcher.cli.main", "top", "--http", address, *more]


@contextmanager
def serving(folder: Path, http: str) -> Iterator[ServeProcess]:
    options = OPTIONS | {"http": http}
    with ServeProcess(folder, warm=True, **options) as server:
        yield server


def is_whole(terminal: Terminal, width: int, height: int) -> bool:
    """Whether a frame of this size is shown."""
    lines = terminal.lines()
    return len(lines) == height and lines[0].startswith("dispatcher top")


def test_a_slow_rank_a_resize_a_restart_and_the_end(
    tmp_path: Path, tool: Callable[[str], str]
) -> None:
    http = free_address()
    with Terminal(tmp_path, tool("tmux"), width=80, height=24) as terminal:
        with serving(tmp_path, http) as server, SlowRankRun(server.endpoint):
            terminal.type(" ".join(command(http, "--interval", "200ms")))
            named = re.compile(rf"rank {SLOW} takes 1\.(3[5-9]|4[0-5]) times")
            eventually(lambda: named.search(terminal.text()), "the slow rank is named")
            assert re.search(r"lost: \d+ % of the ranks' time in", terminal.text())
            assert is_whole(terminal, 80, 24)
            assert len(re.findall(r"^ +\d+  +\d+ .* s +1", terminal.text(), re.MULTILINE)) == RANKS
            (row,) = re.findall(rf"^ +{SLOW}  +\d+ .*$", terminal.text(), re.MULTILINE)
            assert "<" in row

            terminal.resize(80, 15)
            eventually(lambda: "  worst " in terminal.text(), "not all ranks fit")
            terminal.resize(80, 24)

            server.send_signal(signal.SIGSTOP)  # connected, and silent
            eventually(lambda: "no answer since" in terminal.text(), "silence is told")
            server.send_signal(signal.SIGCONT)
            eventually(lambda: "no answer" not in terminal.text(), "it goes on")
            first = server.status()["run_id"][:8]
            assert first in terminal.text()
            server.send_signal(signal.SIGKILL)
            server.wait()
            eventually(lambda: "Connection refused" in terminal.text(), "it is away")
            assert "no answer since" in terminal.text()
        with serving(tmp_path, http) as server:
            run = server.status()["run_id"][:8]
            assert run != first
            eventually(lambda: run in terminal.text(), "the new run is shown")
            eventually(lambda: terminal.text().count("missing") == RANKS, "its ranks are missing")
            assert "no answer" not in terminal.text()
            terminal.press("C-c")
            eventually(lambda: "dispatcher top" not in terminal.lines()[0], "it ends")
            terminal.type(f"echo code $?; {STTY}")
            eventually(lambda: "icanon echo ends" in terminal.text(), "the terminal is sane")
            assert "code 130" in terminal.text()
            assert terminal.text().rstrip().endswith(PROMPT.rstrip())


def test_it_can_be_left_while_nobody_answers(tmp_path: Path, tool: Callable[[str], str]) -> None:
    with Terminal(tmp_path, tool("tmux"), width=60, height=10, NO_COLOR="1") as terminal:
        terminal.type(" ".join(command(free_address())))
        eventually(lambda: "no answer since" in terminal.text(), "it waits")
        terminal.press("C-c")
        eventually(lambda: "no answer" not in terminal.text(), "it ends")
        terminal.type(f"echo code $?; {STTY}")
        eventually(lambda: "icanon echo ends" in terminal.text(), "the terminal is sane")
        assert "code 130" in terminal.text()


def test_once_prints_a_frame_for_scripts(tmp_path: Path) -> None:
    once = ("--once", "--interval", "200ms")
    with serving(tmp_path, "127.0.0.1:0") as server, SlowRankRun(server.endpoint):
        eventually(lambda: server.status()["measured"]["measured_steps"] > 4, "steps are measured")
        frame = top(server.http, *once, COLUMNS="80")
        assert frame.returncode == 0, frame.stderr
        assert re.search(
            rf"^slow: DP rank {SLOW} takes 1\.[34]\d times", frame.stdout, re.MULTILINE
        )
        assert all(len(line) <= 80 for line in frame.stdout.splitlines())
        assert frame.stdout.isascii()
        ready = top("", *once, ready_file=tmp_path / "ready.json")
        assert ready.returncode == 0, ready.stderr


def test_one_that_asks_who_asks_is_told(tmp_path: Path) -> None:
    authority, token = Authority(tmp_path), write_token(tmp_path / "token")
    options: dict[str, Any] = OPTIONS | authority.issue("127.0.0.1").options()
    options["token_file"] = token
    with ServeProcess(tmp_path, warm=True, **options) as server:
        words = ("--once", "--interval", "100ms", "--tls-ca", str(authority.ca))
        told = top(server.http, *words, "--token-file", str(token))
        assert told.returncode == 0, told.stderr
        refused = top(server.http, *words)
        assert (refused.returncode, "HTTP 401" in refused.stderr) == (1, True)
        assert len(refused.stderr.splitlines()) == 1


def test_what_cannot_be_shown_is_told_in_one_line(tmp_path: Path) -> None:
    nobody = free_address()
    refused = top(nobody, "--once")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == f"dispatcher top: {nobody} does not answer: Connection refused\n"
    piped = top(free_address())
    assert piped.returncode == 2
    assert "--once" in piped.stderr


def top(
    http: str, *more: str, ready_file: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    words = command(http, *more)
    if ready_file is not None:
        words = [*words[:4], *more, "--ready-file", str(ready_file)]
    return subprocess.run(
        words, check=False, capture_output=True, text=True, env=os.environ | environment
    )
