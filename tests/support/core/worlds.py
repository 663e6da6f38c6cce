"""A core with all who speak to it, in as many words as a state of any size takes to build."""

from collections import Counter
from collections.abc import Callable

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.effects import Decision
from rollout_dispatcher.sample import Sample
from tests.support.core.cores import Bench
from tests.support.samples import make_sample

#: More samples than any state has: no step can be planned before.
ENDLESS = 1 << 30
#: Bytes of a sample's payload, and its tokens.
NBYTES, TOKENS = 32, 4
#: Where payloads may lie.
STORE = "file:///a"


class World(Bench):
    """A core that plans nothing unless told to, and what its producers have said so far."""

    stores = frozenset({STORE})

    def __init__(
        self, *, batch: int = ENDLESS, capacity: int = ENDLESS, nbytes: int = ENDLESS,
        dp_size: int = 2, **options: object,
    ) -> None:  # fmt: skip
        super().__init__(
            batch=batch, window=batch, capacity=capacity, nbytes=nbytes, held_bytes=ENDLESS,
            max_wait=1e9, dp_size=dp_size, **options,
        )  # fmt: skip
        self.plans = False
        self.next_seq: Counter[str] = Counter()

    def to_push(self, by: str, *samples: Sample) -> Callable[[], Decision]:
        """A push that is ready to be told to the core."""
        first = self.next_seq[by]
        self.next_seq[by] += len(samples)
        arrived = Push(by, first, samples)
        return lambda: self.core.push(arrived, self.now)

    def pushes(self, by: str, count: int = 1, **options: object) -> None:
        """So many samples arrive, one by one."""
        for _ in range(count):
            name = f"{by}/{self.next_seq[by]}"
            self.perform(self.to_push(by, make_sample(name, TOKENS, **options))())  # type: ignore[arg-type]

    def connect(self, *producers: str) -> None:
        """These producers say hello."""
        for producer in producers:
            self.perform(self.core.producer_connected(producer))

    def join(self) -> None:
        """Every rank joins, and waits for a step."""
        super().join()
        self.hungry()
