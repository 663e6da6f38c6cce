"""Child processes of a command, none of which outlives it.

Each child leads a session of its own, so that Ctrl-C reaches the command alone, which then ends
them in order. A child also holds the reading end of a pipe as standard input: one that watches it
(and whatever it started and passed it on to) leaves when the command is gone, even by SIGKILL.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from rollout_dispatcher.errors import DispatcherError

#: What a user, a terminal or a supervisor ends a command with.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: From asking a child to end until it is killed.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, name: str, argv: Sequence[str], *, piped: bool = False) -> None:
        """Start a child; its output goes to `<name>.log`, or with `piped` only its errors do."""
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
        """Whether a child is done. Raises ChildFailed, with the end of its log, if it failed."""
        code = self._children[name].poll()
        if code:
            end = self.log(name).read_text(errors="replace").splitlines()[-LOG_LINES:]
            shown = "".join(f"\n  | {line}" for line in end)
            raise ChildFailed(f"{name} ended with exit code {code}; see {self.log(name)}{shown}")
        return code is not None

    def wait_until_ended(self, name: str, timeout: float) -> None:
        """Wait for a child to end well. Raises ChildFailed if it fails or takes too long."""
        try:
            self._children[name].wait(timeout)
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"{name} did not end within {timeout:g} s") from None
        self.has_ended(name)

    def log(self, name: str) -> Path:
        """Where a child's output goes."""
        return self._folder / f"{name}.log"

    def stop(self) -> None:
        """End every child: ask, wait a little, kill. A signal to us is ignored meanwhile."""
        with _deaf():
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
def _deaf() -> Iterator[None]:
    """Ignore what would interrupt an orderly end; it is bounded in time."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def signals_unwind() -> Iterator[None]:
    """Have whatever ends this process unwind its stack, so that its children are ended.

    SIGINT too: a shell starts background jobs with it ignored, which Python would keep.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
