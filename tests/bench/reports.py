"""What ranks' reports of measured time cost the dispatcher: CPU of a sample with them and without.

    python -m tests.bench.reports [--pairs 10] [--ranks 8] [--steps 20] [--apart] [--json FILE]

One dispatcher, whose ranks train nothing and report in every other step. Shown is the ratio of CPU
seconds of the steps with reports and of those without, and the median of several such ratios.
"""

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from tests.support.client import Producer, Trainer
from tests.support.server import ServeProcess

#: Samples of a rank in a step, and of a micro-batch; tokens of each, 9 bytes: 26 kB.
OF_RANK, OF_MICRO_BATCH, TOKENS = 64, 8, 2900
WARM_UP = 5


class Run:
    """Ranks and a producer of one dispatcher, in lockstep."""

    def __init__(self, server: ServeProcess, ranks: int, *, apart: bool) -> None:
        self._server, self._trainer = server, Trainer(server.endpoint, ranks)
        self._apart = apart
        self._producer, self._batch = Producer(server.endpoint, "p"), OF_RANK * ranks

    def pair(self, steps: int) -> tuple[float, float]:
        """CPU seconds of so many steps without reports, and of as many with them, in turn."""
        spent = [0.0, 0.0]
        for at in range(2 * steps):
            before = self._spent()
            self._step(reports=bool(at % 2))
            spent[at % 2] += self._spent() - before
        return spent[0], spent[1]

    def _step(self, *, reports: bool) -> None:
        for _ in range(0, self._batch, OF_RANK):
            self._producer.push([TOKENS] * OF_RANK)
        (step,) = {part.header.step for part in self._trainer.take()}
        # Beforehand, as what lies between two messages decides whether one read takes both.
        committed = [self._commit(step, rank.dp_rank, reports) for rank in self._trainer.ranks]
        for rank in self._trainer.ranks:
            rank.demand(taken=step, hungry=False)
            rank.send_bytes(committed[rank.dp_rank])
            del rank.steps[step]
        self._trainer.committed = step
        for rank in self._trainer.ranks:
            rank.settle()

    def _commit(self, step: int, dp_rank: int, reports: bool) -> bytes:
        """As a client says it."""
        if not reports:
            return codec.encode(m.Commit(step=step))
        times = _times(step, dp_rank)
        if self._apart:
            return codec.encode(m.Commit(step=step)) + codec.encode(times)
        return codec.encode(m.Commit(step=step, times=[times]))

    def _spent(self) -> float:
        """CPU seconds of all its threads: the scheduler counts them in nanoseconds."""
        threads = Path(f"/proc/{self._server.pid}/task").glob("*/schedstat")
        return sum(int(path.read_text().split()[0]) for path in threads) / 1e9


def _times(step: int, dp_rank: int) -> m.StepTimes:
    """As a rank would say it, with as many digits."""
    busy = [0.123456789 + at / 7 for at in range(OF_RANK // OF_MICRO_BATCH)]
    inside = [at / (7 + dp_rank) for at in range(len(busy))]
    return m.StepTimes(step=step, busy_s=busy, collective_s=inside)


def main() -> None:
    """Print each pair, and the median."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--apart", action="store_true", help="not in the commits but behind them")
    parser.add_argument("--json", type=Path, help="also write the ratios to this file")
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="reports-")))
        options = {
            "dp_size": given.ranks,
            "global_batch_size": OF_RANK * given.ranks,
            "window": 1,
            "micro_batch_size": OF_MICRO_BATCH,
        }
        server = stack.enter_context(ServeProcess(folder, checked=False, **options))
        run = Run(server, given.ranks, apart=given.apart)
        run.pair(WARM_UP)
        ratios = []
        for pair in range(given.pairs):
            without, with_reports = run.pair(given.steps)
            ratios.append(with_reports / without)
            a_sample = 1e6 * without / (given.steps * OF_RANK * given.ranks)
            print(f"pair {pair}: {ratios[-1]:.4f} ({a_sample:.1f} us a sample without)", flush=True)
    print(f"median {median(ratios):.4f}")
    if given.json is not None:
        given.json.write_text(json.dumps({"ratios": ratios, "median": median(ratios)}) + "\n")


if __name__ == "__main__":
    main()
