"""A core with all who speak to it, in as many words as a state of any size takes to build."""

from collections import Counter
from collections.abc import Callable, Iterable

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.buffer.entry import BufferLimits
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import Decision, PlanWanted
from rollout_dispatcher.core.planning.trigger import TriggerConfig
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.sample import Sample
from rollout_planner.cost import parse_cost
from rollout_planner.planner import plan
from rollout_planner.types import PlanConfig, Strategy
from tests.support.samples import make_sample

#: More samples than any state has: no step can be planned before.
ENDLESS = 1 << 30
#: Bytes of a sample's payload, and its tokens.
NBYTES, TOKENS = 32, 4
#: Where payloads may lie.
STORE = "file:///a"


class World:
    """A core, its clock, and what its producers and ranks have said so far."""

    def __init__(
        self,
        *,
        batch: int = ENDLESS,
        capacity: int = ENDLESS,
        nbytes: int = ENDLESS,
        referenced_bytes: int = ENDLESS,
        dp_size: int = 2,
        **options: object,
    ) -> None:
        self.now, self.plans, self.dp_size = 0.0, False, dp_size
        self.next_seq: Counter[str] = Counter()
        limits = BufferLimits(
            capacity, None, None, nbytes, 1000,
            stores=frozenset({STORE}), referenced_bytes=referenced_bytes,
        )  # fmt: skip
        self.core = DispatcherCore(
            DispatchConfig(
                dp_size=dp_size,
                limits=limits,
                trigger=TriggerConfig(batch, batch, max_wait=1e9),
                **options,  # type: ignore[arg-type]
            )
        )
        self._planning = PlanConfig(
            dp_size=dp_size,
            dispatch_batch_size=min(batch, 1 << 20),
            cost=parse_cost("tokens", lambda _: ""),
            micro_batch_tokens=1 << 20,
            strategy=Strategy.ROUND_ROBIN,
        )

    def perform(self, decision: Decision) -> None:
        """Plan what is wanted, if anything is planned in this world yet."""
        for effect in decision.effects:
            if isinstance(effect, PlanWanted) and self.plans:
                found = plan(effect.window, self._planning, effect.take)
                self.perform(self.core.planned(effect, found, self.now))

    def push(self, by: str, *samples: Sample, **options: object) -> Callable[[], Decision]:
        """A push that is ready to be told to the core."""
        first = self.next_seq[by]
        self.next_seq[by] += len(samples)
        arrived = Push(by, first, samples, **options)  # type: ignore[arg-type]
        return lambda: self.core.push(arrived, self.now)

    def pushes(self, by: str, count: int = 1, **options: object) -> None:
        """So many samples arrive, one by one."""
        for _ in range(count):
            name = f"{by}/{self.next_seq[by]}"
            self.perform(self.push(by, make_sample(name, TOKENS, **options))())  # type: ignore[arg-type]

    def connect(self, *producers: str) -> None:
        """These producers say hello."""
        for producer in producers:
            self.perform(self.core.producer_connected(producer))

    def join(self, *, hungry: bool = True) -> None:
        """Every rank joins, and waits for a step."""
        for rank in range(self.dp_size):
            generation = self.core.generation if rank else None
            self.perform(
                self.core.join(RankHello(f"r{rank}", rank, self.dp_size, generation), self.now)
            )
        for rank in range(self.dp_size if hungry else 0):
            self.perform(self.core.demand(rank, -1, self.now, hungry=True))

    def demand(self, *, taken: int) -> None:
        """Every rank waits for the step after `taken`."""
        for rank in range(self.dp_size):
            self.perform(self.core.demand(rank, taken, self.now, hungry=True))

    def prepare(self, step: int) -> None:
        """Every rank holds a step."""
        digest = self.digest(step)
        for rank in range(self.dp_size):
            self.perform(self.core.prepared(rank, step, digest, self.now))

    def train(self, steps: Iterable[int]) -> None:
        """Every rank prepares, takes and commits these steps."""
        for step in steps:
            self.prepare(step)
            self.demand(taken=step)
            for rank in range(self.dp_size):
                self.perform(self.core.commit(rank, step, self.now))

    def digest(self, number: int) -> str:
        """Of an open step."""
        step = self.core.step(number)
        assert step is not None
        return step.digest
