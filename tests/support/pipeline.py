"""A pipeline on a clock: 1F1B, which what the planner says of pipelines is held against."""

from collections.abc import Iterator, Sequence


def step_time(work: Sequence[float], stages: int) -> float:
    """What one pipeline takes for micro-batches of so much work, in this order.

    Each stage does an equal part of a micro-batch, a third of it forward and two thirds backward;
    work is what a stage does, so that micro-batches one after the other take their sum. Stages wait
    for each other and for nothing else.
    """
    count, last = len(work), stages - 1
    done: dict[tuple[str, int, int], float] = {}
    todo = [list(_schedule(count, stages, stage)) for stage in range(stages)]
    at, free = [0] * stages, [0.0] * stages
    while any(at[stage] < len(todo[stage]) for stage in range(stages)):
        for stage in range(stages):
            while at[stage] < len(todo[stage]):
                kind, index = todo[stage][at[stage]]
                if kind == "forward":
                    needs = ("forward", stage - 1, index) if stage else None
                else:
                    needs = ("backward", stage + 1, index) if stage < last else None
                if needs is not None and needs not in done:
                    break
                part = work[index] * (1 / 3 if kind == "forward" else 2 / 3)
                began = max(free[stage], done[needs] if needs else 0.0)
                free[stage] = done[kind, stage, index] = began + part
                at[stage] += 1
    return max(free)


def _schedule(count: int, stages: int, stage: int) -> Iterator[tuple[str, int]]:
    """Forwards until the pipeline is full, then one backward for each forward, then the rest."""
    ahead = min(stages - 1 - stage, count)
    yield from (("forward", index) for index in range(ahead))
    for index in range(count - ahead):
        yield "forward", index + ahead
        yield "backward", index
    yield from (("backward", index) for index in range(count - ahead, count))
