"""Cores in states of any size, and every event that a core is told: for what an event costs.

A *state* is built so large, in one dimension: so many ready samples, open groups, producers, held
pushes, ranks. An *event* is made ready in a world, and then happens. No plan is carried out while
events are counted, so that what is counted is the event's own.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from rollout_dispatcher.balance.cost.models import parse_cost
from rollout_dispatcher.balance.planner import plan
from rollout_dispatcher.core.buffer.freshness import StalenessPolicy
from rollout_dispatcher.core.buffer.limits import BufferLimits
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.decision import Decision
from rollout_dispatcher.core.dispatch import Dispatch
from rollout_dispatcher.core.effects import PayloadsToJournal, PlanWanted
from rollout_dispatcher.core.planning.trigger import TriggerConfig
from rollout_dispatcher.core.producers.push import Push
from rollout_dispatcher.core.ranks.rank_state import RankHello
from rollout_dispatcher.plan import PlanConfig, Strategy
from rollout_dispatcher.sample import SIZE_AT_CLOSE, Sample
from tests.support.samples import make_sample

#: More samples than any state has: no step can be planned before.
ENDLESS = 1 << 30
#: Bytes of a sample's payload, and its tokens.
NBYTES, TOKENS = 32, 4


class World:
    """A core, its clock, and what its producers and ranks have said so far."""

    def __init__(
        self,
        *,
        batch: int = ENDLESS,
        capacity: int = ENDLESS,
        nbytes: int = ENDLESS,
        dp_size: int = 2,
        **options: object,
    ) -> None:
        self.now, self.plans, self.dp_size = 0.0, False, dp_size
        self.next_seq: Counter[str] = Counter()
        self.core = Dispatch(
            DispatchConfig(
                dp_size=dp_size,
                limits=BufferLimits(capacity, None, None, nbytes, 1000),
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
        self.entries_to_journal: list[PayloadsToJournal] = []

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


def names(kind: str, count: int) -> list[str]:
    """So many names of producers, or of groups."""
    return [f"{kind}{at}" for at in range(count)]


# -- states: so much of one thing -------------------------------------------------------------


def ready(size: int) -> World:
    """Samples are ready, ranks wait, and the batch is not full."""
    world = World()
    world.join()
    world.pushes("p", size, policy_version=size)
    return world


def ready_and_ageing(size: int) -> World:
    """The same, each of a policy version of its own, where samples may be too old or too long."""
    world = World(max_staleness=3, staleness_policy=StalenessPolicy.DROP, drop_above=100)
    world.perform(world.core.set_policy_version(1, 0.0, 0))
    world.join()
    for version in range(size):
        world.pushes("p", policy_version=1 + version)
    return world


def open_groups(size: int) -> World:
    """Groups lack members, each of a policy version and a producer of its own."""
    world = World(durable=True)
    world.join()
    for at, group in enumerate(names("g", size)):
        world.connect(f"p{at}")
        world.pushes(f"p{at}", group_id=group, group_size=3, policy_version=size + at)
    return world


def open_groups_at_the_cap(size: int) -> World:
    """Groups lack members, fill the memory, and all but the last are with the journal alone."""
    world = World(durable=True, nbytes=NBYTES)
    world.join()
    for group in names("g", size):
        world.pushes("p", group_id=group, group_size=3)
        decision = world.core.push(
            Push("q", world.next_seq["q"], (make_sample("q/x", TOKENS),)), world.now, may_hold=False
        )
        for effect in decision.effects:
            if isinstance(effect, PayloadsToJournal):
                world.perform(world.core.payloads_durable(effect.entries, world.now))
    return world


def closed_groups(size: int) -> World:
    """Groups were given up of which members are still to come."""
    world = World()
    world.join()
    for group in names("g", size):
        world.pushes("p", group_id=group, group_size=3)
        world.perform(world.core.close_group(group, world.now, keep=False))
    return world


def producers(size: int) -> World:
    """Producers are there, and have contributed."""
    world = World()
    world.join()
    for producer in names("p", size):
        world.connect(producer)
        world.pushes(producer)
    return world


def producers_away(size: int) -> World:
    """They have all lost their connections."""
    world = producers(size)
    for producer in names("p", size):
        world.perform(world.core.producer_lost(producer, world.now))
    return world


def an_end_that_all_are_asked_of(size: int) -> World:
    """All but one producer have ended a phase, and the stream."""
    world = producers(size)
    for producer in names("p", size)[:-1]:
        world.perform(world.core.end_phase(7, world.now, producer))
        world.perform(world.core.end_stream(world.now, producer))
    return world


def ends_that_wait(size: int) -> World:
    """A producer has ended phase after phase, and another one none."""
    world = World()
    world.join()
    world.pushes("slow", policy_version=0)
    for version in range(1, size + 1):
        world.perform(world.core.end_phase(version, world.now, "fast"))
    return world


def ended_phases(size: int) -> World:
    """Phases have ended of which no sample is in a step yet: no rank is there."""
    world = World()
    for version in range(1, size + 1):
        world.pushes("p", policy_version=version)
        world.perform(world.core.end_phase(version + 1, world.now, "p"))
    return world


def held_at_the_soft_cap(size: int) -> World:
    """Pushes are held back, each of a producer of its own; a step could be planned."""
    world = World(batch=8, capacity=8)
    for producer in ["first", *names("p", size)]:
        world.pushes(producer, 8 if producer == "first" else 1, policy_version=1)
    return world


def held_for_an_end(size: int) -> World:
    """The same; a phase has ended, but for what is held back of it."""
    world = held_at_the_soft_cap(size)
    world.perform(world.core.end_phase(2, world.now, force=True))
    return world


def retained_steps(size: int) -> World:
    """Steps are committed, and no checkpoint covers them."""
    world = World(batch=2, capacity=8, durable=True, retain=True)
    world.join()
    world.plans = True
    for step in range(size):
        world.pushes("p", 2)
        world.train([step])
    return world


def open_steps(size: int) -> World:
    """Steps are released to ranks that have not committed any."""
    world = World(batch=2, capacity=8, max_open_steps=size)
    world.join()
    world.plans = True
    for step in range(size):
        world.pushes("p", 2)
        world.prepare(step)
        world.demand(taken=step)
    return world


def ranks(size: int) -> World:
    """DP ranks hold a step, and wait for the next one, of which samples lack."""
    world = World(batch=size, dp_size=size)
    world.join()
    world.plans = True
    world.pushes("p", size)
    world.prepare(0)
    world.demand(taken=0)
    return world


def ranks_at_the_end(size: int) -> World:
    """The stream has ended; DP ranks have been told, and have not committed their last step."""
    world = ranks(size)
    world.perform(world.core.end_stream(world.now, "p"))
    return world


STATES: dict[str, Callable[[int], World]] = {
    state.__name__: state
    for state in (
        ready, ready_and_ageing, open_groups, open_groups_at_the_cap, closed_groups, producers,
        producers_away, an_end_that_all_are_asked_of, ends_that_wait, ended_phases,
        held_at_the_soft_cap, held_for_an_end, retained_steps, open_steps, ranks, ranks_at_the_end,
    )
}  # fmt: skip

# -- events: each is made ready, for the `at`th time, and then happens -------------------------

#: What happens; None: not in this world.
Happens = Callable[[], object] | None


def _sample(at: int, **options: object) -> Sample:
    return make_sample(f"new/{at}", TOKENS, policy_version=ENDLESS, **options)  # type: ignore[arg-type]


def hello_of_a_new_producer(world: World, at: int) -> Happens:
    return lambda: world.core.producer_connected(f"new{at}")


def hello_of_a_known_producer(world: World, at: int) -> Happens:
    return lambda: world.core.producer_connected(f"p{at}")


def producer_lost(world: World, at: int) -> Happens:
    world.perform(world.core.producer_connected(f"brief{at}"))
    world.perform(world.push(f"brief{at}", _sample(at))())
    return lambda: world.core.producer_lost(f"brief{at}", world.now)


def bye_of_a_producer(world: World, at: int) -> Happens:
    world.perform(world.core.producer_connected(f"brief{at}"))
    return lambda: world.core.producer_lost(f"brief{at}", world.now, for_good=True)


def push_of_one(world: World, at: int) -> Happens:
    return world.push("p0", _sample(at))


def push_of_64(world: World, at: int) -> Happens:
    return world.push("p0", *[_sample(64 * at + index) for index in range(64)])


def push_over_http(world: World, at: int) -> Happens:
    push = Push("", 0, (_sample(at),))
    return lambda: world.core.push(push, world.now, may_hold=False)


def duplicate_push(world: World, at: int) -> Happens:
    first = world.push("p0", _sample(at))
    world.perform(first())
    again = Push("p0", world.next_seq["p0"] - 1, (_sample(at),))
    return lambda: world.core.push(again, world.now)


def refused_push(world: World, at: int) -> Happens:
    return world.push("p0", make_sample(f"long/{at}", 1001))


def push_of_a_member(world: World, at: int) -> Happens:
    return world.push("p0", _sample(at, group_id=f"new{at}", group_size=3))


def close_of_an_open_group(world: World, at: int) -> Happens:
    world.perform(world.push("p0", _sample(at, group_id=f"n{at}", group_size=SIZE_AT_CLOSE))())
    return lambda: world.core.close_group(f"n{at}", world.now, size=3, said=("p0", at))


def close_of_an_unknown_group(world: World, at: int) -> Happens:
    return lambda: world.core.close_group(f"unknown{at}", world.now, said=("p0", at))


def withdrawn_member(world: World, at: int) -> Happens:
    world.perform(world.push("p0", _sample(at, group_id=f"w{at}", group_size=3))())
    return lambda: world.core.withdraw(f"w{at}", 3, "p0", [ENDLESS + at], world.now)


def end_of_a_phase(world: World, at: int) -> Happens:
    return lambda: world.core.end_phase(1_000_000 + at, world.now, f"ender{at}")


def end_of_the_stream(world: World, at: int) -> Happens:
    world.perform(world.core.producer_connected(f"ender{at}"))
    last = world.core.statistics().accepted == 0
    return None if last else lambda: world.core.end_stream(world.now, f"ender{at}")


def demand(world: World, at: int) -> Happens:
    rank = at % world.dp_size
    known = world.core.statistics().ranks.get(rank)
    if known is None:
        return None
    return lambda: world.core.demand(rank, known.taken, world.now, hungry=bool(at % 3))


def prepared(world: World, at: int) -> Happens:
    at = world.core.statistics()
    if not at.steps:
        return None
    number = at.steps[-1].number
    digest = world.digest(number)
    return lambda: world.core.prepared(0, number, digest, world.now)


def commit(world: World, at: int) -> Happens:
    rank = at % world.dp_size
    known = world.core.statistics().ranks.get(rank)
    if known is None:
        return None
    return lambda: world.core.commit(rank, known.committed, world.now)


def policy_version(world: World, at: int) -> Happens:
    return lambda: world.core.set_policy_version(1, world.now, 0)


def checkpoint_saved(world: World, at: int) -> Happens:
    planned = world.core.statistics().steps_committed
    return None if planned <= at else lambda: world.core.checkpoint_saved(0, at)


def rank_lost_and_back(world: World, at: int) -> Happens:
    known = world.core.statistics().ranks.get(1)
    if known is None:
        return None
    hello = RankHello(
        "r1", 1, world.dp_size, world.core.generation,
        taken=known.taken, committed=known.committed, hungry=True,
    )  # fmt: skip

    def happens() -> None:
        world.core.leave(1, "r1", world.now)
        world.core.join(hello, world.now)

    return happens


def tick(world: World, at: int) -> Happens:
    return lambda: world.core.tick(world.now)


def next_deadline(world: World, at: int) -> Happens:
    return world.core.next_deadline


def journal_takes_more(world: World, at: int) -> Happens:
    return lambda: world.core.journal_takes_more(world.now)


#: In an order in which each leaves the state as it is for the next ones, but for a few more of it.
EVENTS: dict[str, Callable[[World, int], Happens]] = {
    event.__name__: event
    for event in (
        tick, next_deadline, journal_takes_more, hello_of_a_new_producer, hello_of_a_known_producer,
        demand, prepared, commit, policy_version, checkpoint_saved, rank_lost_and_back,
        push_of_one, push_of_64, push_over_http, duplicate_push, refused_push, push_of_a_member,
        close_of_an_open_group, close_of_an_unknown_group, withdrawn_member,
        producer_lost, bye_of_a_producer, end_of_a_phase, end_of_the_stream,
    )
}  # fmt: skip
