"""A rollout worker that will not finish: it begins groups, side by side, and then generates on.

    python -m tests.e2e.groups.unfinished ENDPOINT NAME PROMPTS MEMBERS

Pushes so many members of so many prompts, and prints the id of each that was accepted. At the end
of its standard input it says goodbye; until then it is there.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rollout_workers import RolloutProducer
from tests.e2e.groups.rollouts import fields, named, prompts
from tests.support.source import ROOT


class Unfinished:
    """Such a worker, as a process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def begun(self, count: int) -> set[str]:
        """The next samples that it was told are accepted."""
        assert self._process.stdout is not None
        return {self._process.stdout.readline().strip() for _ in range(count)}

    def leave(self) -> None:
        """Have it say goodbye."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(20) == 0

    def kill(self) -> None:
        """Kill it -9."""
        self._process.kill()
        self._process.wait()


@contextmanager
def unfinished(endpoint: str, name: str, count: int, members: int) -> Iterator[Unfinished]:
    """Start one; whatever is left of it is killed on the way out."""
    command = [sys.executable, "-m", __spec__.name, endpoint, name, str(count), str(members)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Unfinished(process)
        finally:
            process.kill()


def main(endpoint: str, name: str, count: int, members: int) -> None:
    """Push, and stay."""
    with RolloutProducer(endpoint) as producer:
        for member in range(members):
            for prompt in prompts(name, count):
                sample = prompt.samples[member]
                producer.push(fields(sample), **named(prompt, sample))
                print(sample, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
