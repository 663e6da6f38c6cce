r"""Ranks as blocking sockets, any number in one process: what is measured is the dispatcher alone.

    python -m tests.bench.plane.children.bare_ranks \
        '{"endpoint": "...", "ranks": [0, 256], "dp_size": 512}'

While it waits for first bytes it reads none of them, since decoding hundreds of ranks' messages
would take longer than what it measures.
"""

import time

from tests.bench.plane.children.children import Answer, answer, arguments, obey
from tests.bench.plane.measure.dispatch import last_first_byte, prepare, train
from tests.support.client import Rank


def main() -> None:
    """Join and do the parts of a step when told."""
    given = arguments()
    ranks: list[Rank] = []
    answer(ready=True)

    def join(order: Answer) -> Answer:
        generation = order["generation"]
        for dp_rank in range(*given["ranks"]):
            rank = Rank(
                given["endpoint"], dp_rank, given["dp_size"], generation=generation,
                prefetch_steps=0,
            )  # fmt: skip
            ranks.append(rank)
            generation = rank.generation
        return {"generation": generation}

    def demand(order: Answer) -> Answer:
        for rank in ranks[:-1]:
            rank.demand(taken=order["step"] - 1)
        began = time.monotonic()
        ranks[-1].demand(taken=order["step"] - 1)
        last = last_first_byte(ranks)
        prepare(ranks, order["step"])
        return {"began": began, "last": last}

    def commit(order: Answer) -> Answer:
        train(ranks, order["step"])
        return {}

    obey({"join": join, "demand": demand, "commit": commit})


if __name__ == "__main__":
    main()
