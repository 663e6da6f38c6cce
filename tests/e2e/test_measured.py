"""The questions of docs/metrics.md, asked of a real Prometheus where answers are known.

Ranks are simulated, over real sockets: they train nothing, and report times of their own making.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_dispatcher.cli.main import main
from rollout_dispatcher.protocol import messages as m
from rollout_planner.cost import parse_cost
from rollout_planner.types import FloatArray, Sync, straggler_excess
from tests.e2e.harness import running
from tests.e2e.test_prometheus import answered, config_for, query, value
from tests.support.addresses import free_port
from tests.support.client import Producer, Trainer
from tests.support.server import ServeProcess, eventually
from tests.support.source import ROOT

pytestmark = pytest.mark.e2e

RANKS, SLOW, FACTOR = 4, 2, 1.4
#: Of a step: each in a bin of its own, so that distances of counts are exact.
LENGTHS = [ceil(64 * 2 ** (at / 8)) for at in range(16)]
LONG = 1024
TRANSPORT_S = 0.02
OLD = 3


def questions() -> dict[str, str]:
    """The queries of the document, by their titles."""
    (text,) = re.findall(r"```promql\n(.+?)```", (ROOT / "docs/metrics.md").read_text(), re.DOTALL)
    found = re.findall(r"^# (.+?\?).*\n((?:[^#\n].*\n)+)", text, re.MULTILINE)
    return {title: expression.strip() for title, expression in found}


def asked(title: str, within: str = "5m") -> str:
    (expression,) = [text for words, text in questions().items() if title in words]
    return expression.replace("5m", within)


@dataclass
class Run:
    """Trainers in lockstep that say what their steps took, and producers that keep pace."""

    server: ServeProcess
    trainer: Trainer
    producer: Producer
    pushed: list[int] = field(default_factory=list)
    trained: list[list[int]] = field(default_factory=list)
    tokens: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))

    def push(self, lengths: list[int], version: int) -> None:
        self.producer.send_push(lengths, policy_versions=[version] * len(lengths))
        self.pushed += lengths

    def report_version(self) -> None:
        """The next step trains with weights of its own number; return once that is known."""
        number = self.trainer.committed + 1
        self.trainer.ranks[0].send(m.PolicyVersion(policy_version=number, first_step=number))
        self.server.await_status(policy_version=number)

    def step(self) -> None:
        """Train a step; the times that its ranks report are those of its tokens."""
        parts = self.trainer.take()
        step = parts[0].header.step
        self.trainer.commit(step)
        each = [[head.tokens for head, _ in part.micro_batches] for part in parts]
        self.trained.append([count for rank in each for part in rank for count in part])
        self.tokens = np.array([[sum(part) for part in rank] for rank in each], np.float64)
        report(self.trainer, step, self.compute)

    @property
    def compute(self) -> FloatArray:
        """Seconds outside collectives."""
        return self.tokens * 1e-3 * np.where(np.arange(RANKS) == SLOW, FACTOR, 1)[:, None]

    @property
    def bias(self) -> tuple[float, float]:
        """KS distance of what was dispatched in the last 20 steps, and the level of chance."""
        lately = list(chain(*self.trained[-20:]))
        there = np.array(self.pushed)
        for count in chain(*self.trained[:-20]):
            there = np.delete(there, np.flatnonzero(there == count)[0])
        grid = np.array([*LENGTHS, LONG])
        distances = [np.mean(np.array(lately) <= bound) - np.mean(there <= bound) for bound in grid]
        return float(np.abs(distances).max()), 1.358 / len(lately) ** 0.5


def report(trainer: Trainer, step: int, compute: FloatArray) -> None:
    """Every rank says that it was in each micro-step as long as the slowest one, and transport."""
    busy = compute.max(axis=0) + TRANSPORT_S
    for rank, own in zip(trainer.ranks, compute, strict=True):
        times = m.StepTimes(step=step, busy_s=busy.tolist(), collective_s=(busy - own).tolist())
        rank.send(times)


@contextmanager
def prometheus_of(server: ServeProcess, folder: Path, binary: str) -> Iterator[int]:
    port = free_port()
    command = (
        binary,
        f"--config.file={config_for(server.http, folder)}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    )
    with running(*command):
        yield port


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, tool: Callable[[str], str]
) -> Iterator[tuple[Run, int]]:
    """A run of whole windows, 24 steps of the same lengths, and a Prometheus that has seen it."""
    folder = tmp_path_factory.mktemp("measured")
    binary = tool("prometheus")
    with ExitStack() as stack:
        server = stack.enter_context(
            ServeProcess(
                folder,
                warm=True,
                dp_size=RANKS,
                global_batch_size=len(LENGTHS),
                window=1,
                buffer_capacity=4 * len(LENGTHS),
                micro_batch_size=2,
                cost="tokens",
                groups="ignore",
                max_wait="60s",
            )
        )
        port = stack.enter_context(prometheus_of(server, folder, binary))
        trainer = stack.enter_context(Trainer(server.endpoint, RANKS))
        found = Run(server, trainer, stack.enter_context(Producer(server.endpoint, "p")))
        eventually(lambda: value(port, "dispatcher_ready") == 1, "Prometheus scrapes", 60)
        for number in range(24):
            found.report_version()
            found.push(LENGTHS, max(0, number - OLD))
            found.step()
            time.sleep(0.05)
        found.push([LONG] * 10, 24 - OLD)
        measured = "dispatcher_measured_steps_total == 24 and dispatcher_buffer_samples == 10"
        eventually(lambda: query(port, measured), "everything is scraped", 60)
        yield found, port


def waits(compute: FloatArray) -> FloatArray:
    """float64[R]: seconds that each rank waits for the slowest of each micro-step."""
    found: FloatArray = (compute.max(axis=0) - compute).sum(axis=1)
    return found


def answer(port: int, title: str) -> list[dict[str, Any]]:
    return answered(port, asked(title))


def test_the_document_asks_seven_questions() -> None:
    assert len(questions()) == 7


def test_lost_time_is_divided_between_lengths_and_the_slow_rank(run: tuple[Run, int]) -> None:
    """These ranks report longer waits than they had, so only the division is known."""
    found, port = run
    waited, even = waits(found.compute), waits(found.tokens * 1e-3)
    assert waited.sum() > 2 * even.sum(), "planning sees nothing of it"
    series = answer(port, "Where did the ranks' time go")
    shares = {each["metric"]["cause"]: float(each["value"][1]) for each in series}
    assert sum(shares.values()) == pytest.approx(1)
    both = shares["lengths"] + shares["slow-rank"]
    # What equally fast ranks would wait, of each rank at most what it has waited.
    lengths = np.fmin(waited, even).sum() / waited.sum()
    assert shares["lengths"] / both == pytest.approx(lengths, rel=0.1)


def test_the_slow_rank_is_named_and_no_other(run: tuple[Run, int]) -> None:
    _, port = run
    (series,) = answer(port, "Which rank is slow")
    assert series["metric"]["dp_rank"] == str(SLOW)
    assert float(series["value"][1]) == pytest.approx(FACTOR, rel=0.01)


def test_calibrate_tells_the_cost_of_a_dispatcher_that_serves(
    run: tuple[Run, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Micro-batches took a millisecond a token."""
    assert main(["calibrate", "--http", str(run[0].server.http)]) == 0
    cost = parse_cost(capsys.readouterr().out.splitlines()[0].removeprefix("--cost "))
    two, four = cost(np.array([LONG // 2, LONG]))
    assert four / two == pytest.approx(2, rel=0.05)


def test_whether_a_window_is_too_small_is_what_plans_leave_over(run: tuple[Run, int]) -> None:
    found, port = run
    (series,) = answer(port, "Is the window too small")
    planned = straggler_excess(found.tokens, Sync.MICRO_STEP)
    assert planned > 0
    assert float(series["value"][1]) == pytest.approx(planned, rel=0.01)


def test_bias_is_the_distance_over_what_chance_does(run: tuple[Run, int]) -> None:
    found, port = run
    distance, chance = found.bias
    (series,) = answer(port, "Are the data biased")
    assert distance > 0
    assert float(series["value"][1]) == pytest.approx(distance / chance)


def test_the_weight_of_the_longest_is_theirs_under_token_mean(run: tuple[Run, int]) -> None:
    found, port = run
    long = np.sort(found.pushed)[int(0.99 * len(found.pushed))]
    steps = [np.array(lengths) for lengths in found.trained[-100:]]
    whole = np.array([lengths.sum() for lengths in steps])
    of_long = np.array([lengths[lengths >= long].sum() for lengths in steps])
    truth = 1.0  # of none, as where the longest are passed over all the time
    if of_long.any():
        truth = (of_long / whole).sum() / of_long.sum() * whole.mean()
    (series,) = answer(port, "Do the longest samples count")
    assert float(series["value"][1]) == pytest.approx(truth, rel=0.1)


def test_staleness_is_in_versions(run: tuple[Run, int]) -> None:
    (series,) = answer(run[1], "How stale")
    assert float(series["value"][1]) == pytest.approx(OLD, rel=0.1)


def test_the_bottleneck_is_who_is_waited_for(run: tuple[Run, int]) -> None:
    """Last of all here: first producers are held back, then ranks have nothing to train on."""
    found, port = run
    bottleneck = asked("bottleneck", "2s")
    for _ in range(6):
        found.push(LENGTHS, 24)
    eventually(lambda: (value(port, bottleneck) or 0) > 0.95, "training is the bottleneck", 30)
    while len(found.pushed) - sum(map(len, found.trained)) >= len(LENGTHS):
        found.step()

    def is_starved() -> bool:  # a wait counts once it is over, so these are short
        for hungry in (True, False):
            for rank in found.trainer.ranks:
                rank.demand(taken=found.trainer.committed, hungry=hungry)
                rank.settle()
            time.sleep(0.2 * hungry)
        return -1.2 < (value(port, bottleneck) or 0) < -0.6

    eventually(is_starved, "rollout is", 30)
