"""Child processes: their failures are told, and none outlives its owner."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from rollout_dispatcher.cli.demo import processes
from rollout_dispatcher.cli.demo.processes import ChildFailed, Children, signals_unwind

SLEEP = "import time; time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); {SLEEP}"
#: Starts a process in yet another session, as torchrun does, that watches its standard input.
LAUNCHER = (
    "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', "
    "'import sys; sys.stdin.read()'], start_new_session=True); print(child.pid, flush=True); "
    "time.sleep(600)"
)


def python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", code]


def read_line(children: Children, name: str) -> str:
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(children.output(name), 1)
    return line.decode().strip()


def is_running(pid: int) -> bool:
    """Whether a process exists and is more than an entry that nobody has reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pid: int) -> None:
    """Bounded by the test's timeout."""
    while is_running(pid):
        time.sleep(0.01)


def test_a_failed_child_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    with Children(tmp_path, os.environ) as children:
        children.start("bad", python("raise SystemExit('no such thing')"))
        with pytest.raises(ChildFailed, match=r"bad ended with exit code 1(.|\n)*no such thing"):
            children.wait_until_ended("bad", 60)


def test_a_child_that_takes_too_long_is_told(tmp_path: Path) -> None:
    with Children(tmp_path, os.environ) as children:
        children.start("slow", python(SLEEP))
        assert not children.has_ended("slow")
        with pytest.raises(ChildFailed, match="slow did not end"):
            children.wait_until_ended("slow", 0.01)


def test_children_are_ended_with_their_owner(tmp_path: Path) -> None:
    with Children(tmp_path, os.environ) as children:
        children.start("child", python(f"import os; print(os.getpid()); {SLEEP}"), piped=True)
        pid = int(read_line(children, "child"))
        assert is_running(pid)
    assert not is_running(pid)


def test_a_child_that_will_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.1)
    with Children(tmp_path, os.environ) as children:
        children.start("stubborn", python(f"import os; print(os.getpid()); {STUBBORN}"), piped=True)
        pid = int(read_line(children, "stubborn"))
        assert read_line(children, "stubborn") == "up"
    assert not is_running(pid)


def test_a_grandchild_in_a_session_of_its_own_loses_its_lifeline(tmp_path: Path) -> None:
    with Children(tmp_path, os.environ) as children:
        children.start("launcher", python(LAUNCHER), piped=True)
        grandchild = int(read_line(children, "launcher"))
        assert is_running(grandchild)
    wait_until_gone(grandchild)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_so_that_children_are_ended(
    tmp_path: Path, number: signal.Signals
) -> None:
    pids: list[int] = []

    def interrupted() -> None:
        with signals_unwind(), Children(tmp_path, os.environ) as children:
            children.start("child", python(f"import os; print(os.getpid()); {SLEEP}"), piped=True)
            pids.append(int(read_line(children, "child")))
            os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as left:
        interrupted()
    assert left.value.code == 128 + number
    assert not is_running(pids[0])
