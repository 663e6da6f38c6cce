"""Every event that a core is told; each is made ready in a world, and then happens."""

from collections.abc import Callable
from dataclasses import replace

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.measuring.times import RankTimes
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.sample import SIZE_AT_CLOSE, Sample
from tests.support.core.worlds import ENDLESS, STORE, TOKENS, World
from tests.support.samples import make_sample

#: What happens; None: not in this world.
Happens = Callable[[], object] | None


def _sample(at: int, **options: object) -> Sample:
    return make_sample(f"new/{at}", TOKENS, policy_version=ENDLESS, **options)  # type: ignore[arg-type]


def settings_change(world: World, at: int) -> Happens:
    tuning = replace(world.core.config.tuning, max_wait=2.0 + at)
    return lambda: world.core.configure(tuning, world.now)


def hello_of_a_new_producer(world: World, at: int) -> Happens:
    return lambda: world.core.producer_connected(f"new{at}")


def hello_of_a_known_producer(world: World, at: int) -> Happens:
    return lambda: world.core.producer_connected(f"p{at}")


def producer_lost(world: World, at: int) -> Happens:
    world.perform(world.core.producer_connected(f"brief{at}"))
    world.perform(world.to_push(f"brief{at}", _sample(at))())
    return lambda: world.core.producer_disconnected(f"brief{at}", world.now)


def bye_of_a_producer(world: World, at: int) -> Happens:
    world.perform(world.core.producer_connected(f"brief{at}"))
    return lambda: world.core.producer_disconnected(f"brief{at}", world.now, for_good=True)


def push_of_one(world: World, at: int) -> Happens:
    return world.to_push("p0", _sample(at))


def push_of_64(world: World, at: int) -> Happens:
    return world.to_push("p0", *[_sample(64 * at + index) for index in range(64)])


def push_of_64_references(world: World, at: int) -> Happens:
    return world.to_push("p0", *[_sample(64 * at + index, store=STORE) for index in range(64)])


def push_over_http(world: World, at: int) -> Happens:
    push = Push("", 0, (_sample(at),))
    return lambda: world.core.push(push, world.now, may_wait=False)


def duplicate_push(world: World, at: int) -> Happens:
    first = world.to_push("p0", _sample(at))
    world.perform(first())
    again = Push("p0", world.next_seq["p0"] - 1, (_sample(at),))
    return lambda: world.core.push(again, world.now)


def refused_push(world: World, at: int) -> Happens:
    return world.to_push("p0", make_sample(f"long/{at}", 1001))


def push_of_a_member(world: World, at: int) -> Happens:
    return world.to_push("p0", _sample(at, group_id=f"new{at}", group_size=3))


def close_of_an_open_group(world: World, at: int) -> Happens:
    world.perform(world.to_push("p0", _sample(at, group_id=f"n{at}", group_size=SIZE_AT_CLOSE))())
    return lambda: world.core.close_group(f"n{at}", world.now, size=3, request=("p0", at))


def close_of_an_unknown_group(world: World, at: int) -> Happens:
    return lambda: world.core.close_group(f"unknown{at}", world.now, request=("p0", at))


def withdrawn_member(world: World, at: int) -> Happens:
    world.perform(world.to_push("p0", _sample(at, group_id=f"w{at}", group_size=3))())
    return lambda: world.core.withdraw(f"w{at}", 3, "p0", [ENDLESS + at], world.now)


def end_of_a_phase(world: World, at: int) -> Happens:
    return lambda: world.core.end_phase(1_000_000 + at, world.now, f"ender{at}")


def end_of_the_stream(world: World, at: int) -> Happens:
    world.perform(world.core.producer_connected(f"ender{at}"))
    last = world.core.statistics().accepted == 0
    return None if last else lambda: world.core.end_stream(world.now, f"ender{at}")


def demand(world: World, at: int) -> Happens:
    rank = at % len(world.ranks)
    known = world.core.statistics().ranks.get(rank)
    if known is None:
        return None
    return lambda: world.core.demand(rank, known.taken, world.now, hungry=bool(at % 3))


def prepared(world: World, at: int) -> Happens:
    steps = world.core.statistics().steps
    if not steps:
        return None
    number = steps[-1].number
    digest = world.core._ledger.steps[number].digest
    return lambda: world.core.prepared(0, number, digest, world.now)


def commit(world: World, at: int) -> Happens:
    rank = at % len(world.ranks)
    known = world.core.statistics().ranks.get(rank)
    if known is None:
        return None
    return lambda: world.core.commit(rank, known.committed, world.now)


def step_times(world: World, at: int) -> Happens:
    rank = at % len(world.ranks)
    steps = world.core.statistics().steps
    if rank not in world.core.statistics().ranks or not steps:
        return None
    times = RankTimes(steps[0].number, "update", [1.0], [0.5])
    return lambda: world.core.step_times(rank, times)


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
        "r1", 1, len(world.ranks), world.core.generation,
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
        tick, next_deadline, settings_change, journal_takes_more,
        hello_of_a_new_producer, hello_of_a_known_producer, demand,
        prepared, commit, step_times, policy_version, checkpoint_saved, rank_lost_and_back,
        push_of_one, push_of_64, push_of_64_references, push_over_http, duplicate_push,
        refused_push, push_of_a_member,
        close_of_an_open_group, close_of_an_unknown_group, withdrawn_member,
        producer_lost, bye_of_a_producer, end_of_a_phase, end_of_the_stream,
    )
}  # fmt: skip
