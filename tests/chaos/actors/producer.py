"""One producer of the chaos run: pushes until SIGTERM, and writes down what was acknowledged.

    python -m tests.chaos.actors.producer ENDPOINT NUMBER HISTORY [grouped]

`push` is written before each push, so a sample without that line does not exist. A producer that
was killed goes on behind the last number of its file. Producer 0 first pushes again, under the
same ids, what had no answer; producer 1 leaves that in doubt; producer 2 gives no ids, and pushes
with a timeout, so that some pushes are given up. `grouped`: what producer 1 pushes together is a
group.
"""

import random
import signal
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Event

from rollout_dispatcher.errors import BufferFull
from rollout_workers.demo.data import leave_with_starter
from rollout_workers.producer.encode import RolloutSample
from rollout_workers.producer.producer import RolloutProducer
from tests.chaos.actors.samples import ballast_of, tokens_of
from tests.chaos.verdict.history import ProducerHistory, Writer, read_producer

MOST_AT_ONCE = 6
PATIENCE_S = 120.0
#: Shorter than a busy dispatcher needs at times.
TIMEOUT_S = 0.05
REPEATS, GROUPS, NAMELESS = 0, 1, 2


class Load:
    """Pushes samples of one producer."""

    def __init__(
        self, producer: RolloutProducer, number: int, history: Writer, *, grouped: bool
    ) -> None:
        self._producer, self._number, self._history = producer, number, history
        self._grouped = grouped and number == GROUPS
        self._random = random.Random()  # how much at once is no part of the seeded faults

    def run(self, before: ProducerHistory, stopping: Event) -> None:
        """Go on where an earlier process stopped; the push that is under way is the last then."""
        if self._number == REPEATS:
            unanswered = [name for name in before.pushed if name not in before.acknowledged]
            for at in range(0, len(unanswered), MOST_AT_ONCE):
                self.push(unanswered[at : at + MOST_AT_ONCE])
        following = count(max((int(name.split("-")[1]) for name in before.pushed), default=-1) + 1)
        while not stopping.is_set():
            size = self._random.randint(1, MOST_AT_ONCE)
            self.push([f"{self._number}-{next(following)}" for _ in range(size)])

    def push(self, names: list[str]) -> None:
        """Push samples, and say what became of them."""
        named = self._number != NAMELESS
        hurried = not named and self._random.random() < 0.3
        samples = [sample_of(name, named=named) for name in names]
        if self._grouped:
            samples = [replace(one, group_id=names[0], group_size=len(names)) for one in samples]
        self._history.write("grouped" if self._grouped else "push", names)
        try:
            outcomes = self._producer.push_many(samples, timeout=TIMEOUT_S if hurried else None)
        except (BufferFull, TimeoutError) as error:
            fate = " ".join([str(error), *getattr(error, "__notes__", ())])
            self._history.write("withdrawn" if "was withdrawn" in fate else "given-up", names)
        else:
            self._history.write("acknowledged", names, [str(outcome) for outcome in outcomes])


def sample_of(name: str, *, named: bool) -> RolloutSample:
    """The sample of this name, which is also its id if `named`."""
    tokens = tokens_of(name)
    fields = {"input_ids": tokens, "ballast": ballast_of(tokens)}
    return RolloutSample(fields, name if named else None)


def main(endpoint: str, number: int, path: Path, *, grouped: bool) -> None:
    """Run one producer until SIGTERM."""
    stopping = Event()

    def stop(*_: object) -> None:
        signal.alarm(0)  # by which Ray would abort a process that takes longer than 3 s to end
        stopping.set()

    signal.signal(signal.SIGTERM, stop)
    leave_with_starter()
    before = read_producer(path)
    with RolloutProducer(endpoint, reconnect_timeout=PATIENCE_S) as producer:
        Load(producer, number, Writer(path), grouped=grouped).run(before, stopping)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), grouped="grouped" in sys.argv[4:])
