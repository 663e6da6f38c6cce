"""Ledgers of two ranks, and what is said to them."""

import numpy as np

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.effects import Effect
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.errors import ConfigError
from rollout_planner.types import Plan, Sync
from tests.support.samples import make_sample


def hello(dp_rank: int, generation: int | None = 1, **options: object) -> RankHello:
    client = options.pop("client_id", f"rank-{dp_rank}")
    return RankHello(client, dp_rank, 2, generation, **options)  # type: ignore[arg-type]


def join(ledger: StepLedger, hello: RankHello, now: float) -> list[Effect]:
    """A rank that may join does; raises what says that it may not."""
    ledger.generation.check(hello)
    begun = ledger.begin(hello) if hello.generation is None else []
    return [*begun, *ledger.join(hello, now)]


def make_ledger(*, max_open_steps: int = 4) -> StepLedger:
    ledger = StepLedger(2, max_open_steps)
    join(ledger, hello(0, None), 0.0)
    join(ledger, hello(1), 0.0)
    begin(ledger)
    return ledger


def begin(ledger: StepLedger) -> None:
    """Every rank asks for steps from where the generation stands."""
    for dp_rank, rank in ledger.ranks.items():
        ledger.demand(dp_rank, rank.taken, hungry=False)


def open_step(ledger: StepLedger, *names: str) -> list[Effect]:
    """A step with one micro-batch a rank: even places to rank 0, odd ones to rank 1."""
    names = names or ("a", "b")
    entries = tuple(Entry(make_sample(name), at, 0.0) for at, name in enumerate(names))
    places = np.arange(len(names))
    parts = (places[::2], places[1::2])
    counts = np.array([[len(part)] for part in parts])
    plan = Plan(np.concatenate(parts), counts, np.ones((2, 1)), Sync.STEP, 0.0, 0.0, 1.0)
    return ledger.open(plan, entries, 0.0, 0.0)


def prepare(ledger: StepLedger, step: int, *ranks: int) -> list[Effect]:
    effects: list[Effect] = []
    for rank in ranks or (0, 1):
        effects += ledger.prepared(rank, step, ledger.steps[step].digest)
    return effects


def in_pairs_only(dp_size: int) -> None:
    if dp_size % 2:
        raise ConfigError("an odd number")


def make_elastic_ledger() -> StepLedger:
    """Of two ranks, with two open steps."""
    ledger = StepLedger(2, 4, in_pairs_only)
    join(ledger, hello(0, None), 0.0)
    join(ledger, hello(1), 0.0)
    begin(ledger)
    open_step(ledger, *"abcd")
    open_step(ledger, *"efgh")
    prepare(ledger, 0)
    return ledger
