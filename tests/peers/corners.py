"""The table's cases: what is asked, on which lengths, and which figure is compared."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rollout_planner import Quadratic
from rollout_planner.types import Layout, Sync
from tests.peers.lengths import available, draw, draw_groups
from tests.peers.problem import Corner, Figure, Problem

SEEDS = range(3)
#: A step of so many samples is tried with one seed.
LARGE = 10_000
#: transformers' own cost: what its sampler balances, so that neither side guesses.
PADDED_COST = Quadratic(1, 1000)


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table. problems: makes its steps; their figures are summed."""

    name: str
    corner: Corner
    figure: Figure
    lengths: tuple[str, ...]
    problems: Callable[[], list[Problem]]

    @property
    def available(self) -> bool:
        """Whether its lengths are here."""
        return all(map(available, self.lengths))


def all_cases() -> Iterator[Case]:
    """Every row, corner after corner."""
    yield from padded()
    yield from budgets()
    yield from groups()
    yield from equal()
    yield from counts()
    yield from multiples()
    yield from minimums()
    yield from together()
    yield from times()


def _case(
    corner: Corner, figure: Figure, said: str, problem: "partial[Problem]", seeds: range = SEEDS
) -> Case:
    """problem: takes a seed, and has the name of its lengths as `name`."""
    name = problem.keywords["name"]
    return Case(
        f"{corner}: {name} {said}",
        corner,
        figure,
        (name,),
        lambda: [problem(seed) for seed in seeds],
    )


def _example(corner: Corner, figure: Figure, said: str, problem: Problem) -> Case:
    return Case(f"{corner}: {said}", corner, figure, (), lambda: [problem])


def _samples(seed: int, *, name: str, n: int, ranks: int, **asked: Any) -> Problem:
    return Problem(draw(name, n, seed), ranks, **asked)


def _in_groups(seed: int, *, name: str, count: int, ranks: int, **asked: Any) -> Problem:
    lengths, group = draw_groups(name, count, seed)
    return Problem(lengths, ranks, group=group, **asked)


def padded() -> Iterator[Case]:
    """Padded micro-batches of any number of samples: R ranks, M micro-batches, m on average."""
    for name, R, M, m in (
        ("lognormal", 8, 4, 4),
        ("lineage", 64, 4, 4),
        ("reasoning_gym", 16, 8, 8),
        ("azure_conv", 16, 8, 8),
    ):
        asked: dict[str, Any] = {"cost": PADDED_COST, "layout": Layout.PADDED, "micro_batches": M}
        problem = partial(_samples, name=name, n=R * M * m, ranks=R, **asked)
        yield _case(Corner.PADDED, Figure.TIME, f"{R}x{M}x{m}", problem)


def budgets() -> Iterator[Case]:
    """Token budgets where ranks meet once a step, and at every micro-step."""
    for name, n, ranks, budget in (
        ("lognormal", 1024, 64, 65536),
        ("lognormal wide", 1024, 64, 32768),
        ("lognormal wide", 2048, 32, 32768),
        ("lineage", 1024, 64, 67584),
        ("reasoning_gym", 1024, 64, 16384),
        ("azure_conv", 1024, 64, 14336),
        ("deepseek", 16384, 8, 65536),
    ):
        seeds = SEEDS if n < LARGE else range(1)
        for sync in Sync:
            asked: dict[str, Any] = {"sync": sync, "micro_batch_tokens": budget}
            problem = partial(_samples, name=name, n=n, ranks=ranks, **asked)
            said = f"{n}/{ranks} of {budget}, {sync}"
            yield _case(Corner.BUDGET, Figure.TIME, said, problem, seeds)
    lengths = np.array([1, 3, 6, 5, 5, 2, 10])
    example = Problem(lengths, 2, Quadratic(1, 0), sync=Sync.STEP, micro_batch_tokens=10)
    said = "1 3 6 5 5 2 10 on 2 of 10, step, s^2"
    yield _example(Corner.BUDGET, Figure.TIME, said, example)


def groups() -> Iterator[Case]:
    """Groups that stay on one rank: one size by itself, and many together."""
    sizes = ((64, 8), (128, 16), (256, 16), (256, 64), (512, 32))
    traces = ("deepseek", "tau", "lineage", "reasoning_gym", "lognormal")
    step = partial(_in_groups, sync=Sync.STEP)
    one = partial(step, name="deepseek", count=256, ranks=64)
    yield _case(Corner.GROUPS, Figure.TIME, "256 groups on 64", one)
    yield Case(
        f"{Corner.GROUPS}: 5 lengths x 5 sizes x 3 seeds",
        Corner.GROUPS,
        Figure.TIME,
        traces,
        lambda: [
            step(seed, name=name, count=count, ranks=ranks)
            for name in traces
            for count, ranks in sizes
            for seed in SEEDS
        ],
    )


def equal() -> Iterator[Case]:
    """As many samples on each rank, by the function that does nothing else."""
    for name in ("reasoning_gym", "lognormal", "lineage"):
        for n, ranks in ((512, 8), (4096, 64)):
            problem = partial(_samples, name=name, n=n, ranks=ranks, sync=Sync.STEP)
            yield _case(Corner.EQUAL, Figure.TIME, f"{n}/{ranks}", problem)


def counts() -> Iterator[Case]:
    """How many micro-batches a budget takes: of many short samples, and nearly full."""
    azure = partial(_samples, name="azure_conv", n=4096, ranks=8, micro_batch_tokens=14336)
    yield _case(Corner.COUNT, Figure.COUNT, "4096/8 of 14336", azure, range(10))
    tight = partial(_tight, name="lognormal wide")
    yield _case(Corner.COUNT, Figure.COUNT, "3001 and more, 99.4 % full", tight, range(40))


def _tight(seed: int, *, name: str) -> Problem:
    lengths = draw(name, 3001 + 17 * seed, seed)
    return Problem(lengths, 1, micro_batch_tokens=int(lengths.sum() / 64 / 0.994))


def multiples() -> Iterator[Case]:
    """A number of micro-batches that a pipeline asks for."""
    lengths = np.array([100, 20, 20, 20, 20, 10, 5, 5])
    example = Problem(lengths, 2, micro_batch_tokens=128, multiple=4)
    asked = {"micro_batch_tokens": 16384, "multiple": 4}
    gym = partial(_samples, name="reasoning_gym", n=1024, ranks=64, **asked)
    for figure in (Figure.EMPTY, Figure.TIME):
        said = f"100 20 20 20 20 10 5 5 on 2 of 128, by 4, {figure}"
        yield _example(Corner.MULTIPLE, figure, said, example)
        yield _case(Corner.MULTIPLE, figure, f"1024/64 of 16384, by 4, {figure}", gym)


def minimums() -> Iterator[Case]:
    """No fewer micro-batches than a pipeline has stages."""
    asked = {"micro_batch_tokens": 131072, "minimum": 8}
    problem = partial(_samples, name="lognormal", n=512, ranks=16, **asked)
    for figure in (Figure.TIME, Figure.EMPTY):
        yield _case(Corner.MINIMUM, figure, f"512/16 of 131072, 8 or more, {figure}", problem)


def together() -> Iterator[Case]:
    """Groups in one micro-batch."""
    asked = {"micro_batch_tokens": 65536, "together": True}
    problem = partial(_in_groups, name="deepseek", count=128, ranks=8, **asked)
    for figure in (Figure.TIME, Figure.COUNT):
        yield _case(Corner.TOGETHER, figure, f"128 groups on 8 of 65536, {figure}", problem)


def times() -> Iterator[Case]:
    """How long it takes to plan; how long ranks then wait is among the budgets."""
    large = partial(_samples, name="deepseek", n=16384, ranks=8, micro_batch_tokens=65536)
    yield _case(Corner.TIME, Figure.MS, "16384/8 of 65536", large, range(1))
