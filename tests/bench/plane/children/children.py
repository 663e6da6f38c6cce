"""The processes of a benchmark: each takes orders as JSON lines and answers each with one.

Nobody waits without a bound: a parent that hears nothing in time fails, a child whose order takes
too long is ended by its own alarm, and one that has lost its parent reads the end of its orders.
"""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from tests.support.source import PYTHONPATH, ROOT

#: No order takes longer than this, in seconds.
PATIENCE_S = 120
Answer = dict[str, Any]


class Child:
    """A Python module, or file, that runs as a process of its own, told its arguments as JSON.

    python: its interpreter, for a peer that lives in another environment. environ: what its
    environment has besides.
    """

    def __init__(
        self,
        module: str | Path,
        arguments: Mapping[str, object],
        python: str = sys.executable,
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        by_name = [] if isinstance(module, Path) else ["-m"]
        self.name = module.stem if isinstance(module, Path) else module.rpartition(".")[2]
        self._process = subprocess.Popen(
            [python, *by_name, str(module), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": PYTHONPATH, **environ},
        )
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def tell(self, **order: object) -> None:
        """Give an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, timeout: float = PATIENCE_S) -> Answer:
        """Its next answer; raises RuntimeError if it ended, TimeoutError if it is late."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise TimeoutError(f"{self.name} did not answer within {timeout:g} s")
            data = os.read(self._process.stdout.fileno(), 1 << 20)
            if not data:
                raise RuntimeError(f"{self.name} ended with exit code {self._process.wait()}")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        answer: Answer = json.loads(line)
        return answer

    def ask(self, **order: object) -> Answer:
        """Give an order and wait for its answer."""
        self.tell(**order)
        return self.hear()


@contextmanager
def all_of(*children: Child) -> Iterator[None]:
    """End these children at the end of the block, whatever happens."""
    try:
        yield
    finally:
        for child in children:
            child.__exit__()


# -- in the child


def arguments() -> Answer:
    """What the parent started this process with."""
    found: Answer = json.loads(sys.argv[1])
    return found


def answer(**facts: object) -> None:
    """Answer an order."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def orders() -> Iterator[Answer]:
    """Orders until the parent is gone; each has to be done in time."""
    for line in sys.stdin:
        signal.alarm(PATIENCE_S)
        yield json.loads(line)
        signal.alarm(0)


async def orders_in_a_loop() -> AsyncIterator[Answer]:
    """The same for a process that has an event loop to keep going between orders."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        signal.alarm(PATIENCE_S)
        yield json.loads(line)
        signal.alarm(0)


def obey(work: Mapping[str, Callable[[Answer], Mapping[str, object]]]) -> None:
    """Carry out orders by their `do`, and answer each with what its work returns."""
    for order in orders():
        answer(**work[order["do"]](order))
