"""The table's cases: what is asked, on which lengths, and which figure is compared."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rollout_dispatcher.balance import Quadratic
from rollout_dispatcher.plan import Layout, Sync
from tests.peers.lengths import available, draw, draw_groups
from tests.peers.problem import Corner, Figure, Problem

SEEDS = range(3)
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
    corner: Corner,
    figure: Figure,
    said: str,
    lengths: str,
    problem: Callable[[int], Problem],
    seeds: range = SEEDS,
) -> Case:
    name = f"{corner}: {lengths} {said}"
    return Case(name, corner, figure, (lengths,), lambda: [problem(seed) for seed in seeds])


def padded() -> Iterator[Case]:
    """Padded micro-batches of any number of samples: R ranks, M micro-batches, m on average."""
    sizes = (("lognormal", 8, 4, 4), ("lineage", 64, 4, 4))
    sizes += (("reasoning_gym", 16, 8, 8), ("azure_conv", 16, 8, 8))
    for lengths, R, M, m in sizes:

        def problem(seed: int, name: str = lengths, R: int = R, M: int = M, m: int = m) -> Problem:
            return Problem(
                draw(name, R * M * m, seed),
                R,
                PADDED_COST,
                layout=Layout.PADDED,
                micro_batches=M,
            )

        yield _case(Corner.PADDED, Figure.TIME, f"{R}x{M}x{m}", lengths, problem)


def budgets() -> Iterator[Case]:
    """Token budgets where ranks meet once a step, and at every micro-step."""
    for lengths, n, R, budget in (
        ("lognormal", 1024, 64, 65536),
        ("lognormal wide", 1024, 64, 32768),
        ("lognormal wide", 2048, 32, 32768),
        ("lineage", 1024, 64, 67584),
        ("reasoning_gym", 1024, 64, 16384),
        ("azure_conv", 1024, 64, 14336),
    ):
        for sync in Sync:

            def problem(
                seed: int,
                name: str = lengths,
                n: int = n,
                R: int = R,
                budget: int = budget,
                sync: Sync = sync,
            ) -> Problem:
                return Problem(draw(name, n, seed), R, sync=sync, micro_batch_tokens=budget)

            yield _case(
                Corner.BUDGET, Figure.TIME, f"{n}/{R} of {budget}, {sync}", lengths, problem
            )
    example = Problem(
        np.array([1, 3, 6, 5, 5, 2, 10]),
        2,
        Quadratic(1, 0),
        sync=Sync.STEP,
        micro_batch_tokens=10,
    )
    name = f"{Corner.BUDGET}: 1 3 6 5 5 2 10 on 2 of 10, step, s^2"
    yield Case(name, Corner.BUDGET, Figure.TIME, (), lambda: [example])


def groups() -> Iterator[Case]:
    """Groups that stay on one rank: one size by itself, and many together."""
    sizes = ((64, 8), (128, 16), (256, 16), (256, 64), (512, 32))
    traces = ("deepseek", "tau", "lineage", "reasoning_gym", "lognormal")

    def problem(name: str, count: int, R: int, seed: int) -> Problem:
        lengths, group = draw_groups(name, count, seed)
        return Problem(lengths, R, sync=Sync.STEP, group=group)

    yield _case(
        Corner.GROUPS,
        Figure.TIME,
        "256 groups on 64",
        "deepseek",
        lambda seed: problem("deepseek", 256, 64, seed),
    )
    yield Case(
        f"{Corner.GROUPS}: 5 lengths x 5 sizes x 3 seeds",
        Corner.GROUPS,
        Figure.TIME,
        traces,
        lambda: [
            problem(name, count, R, seed)
            for name in traces
            for count, R in sizes
            for seed in SEEDS
        ],
    )


def equal() -> Iterator[Case]:
    """As many samples on each rank, by the function that does nothing else."""
    for lengths in ("reasoning_gym", "lognormal", "lineage"):
        for n, R in ((512, 8), (4096, 64)):

            def problem(seed: int, name: str = lengths, n: int = n, R: int = R) -> Problem:
                return Problem(draw(name, n, seed), R, sync=Sync.STEP)

            yield _case(Corner.EQUAL, Figure.TIME, f"{n}/{R}", lengths, problem)


def counts() -> Iterator[Case]:
    """How many micro-batches a budget takes: where bins are nearly full, and many short samples."""

    def azure(seed: int) -> Problem:
        return Problem(draw("azure_conv", 4096, seed), 8, micro_batch_tokens=14336)

    yield _case(Corner.COUNT, Figure.COUNT, "4096/8 of 14336", "azure_conv", azure, range(10))

    def tight(seed: int) -> Problem:
        lengths = draw("lognormal wide", 3001 + 17 * seed, seed)
        budget = int(lengths.sum() / 64 / 0.994)
        return Problem(lengths, 1, micro_batch_tokens=budget)

    yield _case(
        Corner.COUNT, Figure.COUNT, "3001 and more, 99.4 % full", "lognormal wide", tight, range(40)
    )


def multiples() -> Iterator[Case]:
    """A number of micro-batches that a pipeline asks for."""
    lengths = np.array([100, 20, 20, 20, 20, 10, 5, 5])
    example = Problem(lengths, 2, micro_batch_tokens=128, multiple=4)
    name = f"{Corner.MULTIPLE}: 100 20 20 20 20 10 5 5 on 2 of 128, by 4"
    for figure in (Figure.EMPTY, Figure.TIME):
        yield Case(f"{name}, {figure}", Corner.MULTIPLE, figure, (), lambda: [example])

        def gym(seed: int) -> Problem:
            lengths = draw("reasoning_gym", 1024, seed)
            return Problem(lengths, 64, micro_batch_tokens=16384, multiple=4)

        said = f"1024/64 of 16384, by 4, {figure}"
        yield _case(Corner.MULTIPLE, figure, said, "reasoning_gym", gym)


def minimums() -> Iterator[Case]:
    """No fewer micro-batches than a pipeline has stages."""

    def problem(seed: int) -> Problem:
        return Problem(draw("lognormal", 512, seed), 16, micro_batch_tokens=131072, minimum=8)

    for figure in (Figure.TIME, Figure.EMPTY):
        said = f"512/16 of 131072, 8 or more, {figure}"
        yield _case(Corner.MINIMUM, figure, said, "lognormal", problem)


def together() -> Iterator[Case]:
    """Groups in one micro-batch."""

    def problem(seed: int) -> Problem:
        lengths, group = draw_groups("deepseek", 128, seed)
        return Problem(lengths, 8, micro_batch_tokens=65536, group=group, together=True)

    for figure in (Figure.TIME, Figure.COUNT):
        yield _case(
            Corner.TOGETHER, figure, f"128 groups on 8 of 65536, {figure}", "deepseek", problem
        )


def times() -> Iterator[Case]:
    """How long it takes to plan; verl only divides over ranks, SkyRL only packs each one's chunk."""

    def large(seed: int) -> Problem:
        return Problem(draw("deepseek", 16384, seed), 8, micro_batch_tokens=65536)

    yield _case(Corner.TIME, Figure.MS, "16384/8 of 65536", "deepseek", large, range(1))

    def budget(seed: int) -> Problem:
        return Problem(draw("lognormal", 512, seed), 16, micro_batch_tokens=131072)

    yield _case(Corner.TIME, Figure.MS, "512/16 of 131072", "lognormal", budget, range(1))

    def fixed(seed: int) -> Problem:
        return Problem(draw("lognormal", 512, seed), 16, micro_batch_size=4)

    yield _case(Corner.TIME, Figure.MS, "512/16, 4 each", "lognormal", fixed, range(1))
