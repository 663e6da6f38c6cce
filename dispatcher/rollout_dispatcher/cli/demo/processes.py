"""Child processes of a command, none of which outlives it.

Each child leads its own session, so Ctrl-C reaches the command alone, which then ends the children
in order. The standard input of a child is a pipe from the command: a child that reads it sees the
end of file once the command is gone, even by SIGKILL.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

from rollout_dispatcher.errors import DispatcherError

#: Signals with which a user, a terminal or a supervisor ends a command.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: From SIGTERM to SIGKILL.
GRACE_SECONDS = 5.0
#: Lines of a failed child's log that its error shows.
LOG_LINES = 8


class ChildFailed(DispatcherError):
    """A child process ended with an error."""

    code = "child-failed"


class Children:
    """Started processes by name, their output in `folder`; a context manager that ends them."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._folder, self._environ = folder, dict(environ)
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, argv: Sequence[str], *, piped: bool = False) -> None:
        """Start a child; its output and errors go to `<name>.log`, with `piped` only the errors."""
        with self.log(name).open("wb") as log:
            self._children[name] = subprocess.Popen(  # noqa: S603 (our own command lines)
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if piped else log,
                stderr=log,
                env=self._environ,
                start_new_session=True,
            )

    def output(self, name: str) -> int:
        """File descriptor of a piped child's output."""
        stdout = self._children[name].stdout
        assert stdout is not None, f"{name} was not started with piped=True"
        return stdout.fileno()

    def has_ended(self, name: str) -> bool:
        """Whether a child has ended. Raises ChildFailed, with the end of its log, if it failed."""
        code = self._children[name].poll()
        if code:
            end = self.log(name).read_text(errors="replace").splitlines()[-LOG_LINES:]
            shown = "".join(f"\n  | {line}" for line in end)
            raise ChildFailed(f"{name} ended with exit code {code}; see {self.log(name)}{shown}")
        return code is not None

    def wait_until_ended(self, name: str, timeout: float) -> None:
        """Wait for a child to succeed. Raises ChildFailed if it fails, or after `timeout` s."""
        try:
            self._children[name].wait(timeout)
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"{name} did not end within {timeout:g} s") from None
        self.has_ended(name)

    def log(self, name: str) -> Path:
        """The log file of a child."""
        return self._folder / f"{name}.log"

    def stop(self) -> None:
        """End every child: SIGTERM, GRACE_SECONDS, SIGKILL. Signals to us are ignored meanwhile."""
        with _handling(signal.SIG_IGN):
            for child in self._children.values():
                if child.stdin is not None:
                    child.stdin.close()
                _signal_group(child, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_SECONDS
            for child in self._children.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, deadline - time.monotonic()))
                _signal_group(child, signal.SIGKILL)
                child.wait()
                if child.stdout is not None:
                    child.stdout.close()
            self._children.clear()


def _signal_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a child and what it started in its session; a reaped child's number is not reused."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)


@contextlib.contextmanager
def _handling(handler: Any) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in ENDING}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def signals_unwind() -> contextlib.AbstractContextManager[None]:
    """Turn a signal of ENDING into SystemExit, so that the stack unwinds and children are ended.

    SIGINT too: a shell starts background jobs with it ignored, and Python would keep that.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    return _handling(leave)
