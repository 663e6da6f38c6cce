"""States of a core, each as large as is asked for in one dimension.

So many ready samples, open groups, producers, held pushes, retained steps, or ranks. No plan is
carried out for events that come later, so that what these cost is their own.
"""

from collections.abc import Callable

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.buffer.phases import StalenessPolicy
from tests.support.core.worlds import NBYTES, TOKENS, World
from tests.support.samples import make_sample


def names(kind: str, count: int) -> list[str]:
    """So many names of producers, or of groups."""
    return [f"{kind}{at}" for at in range(count)]


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
        push = Push("q", world.next_seq["q"], (make_sample("q/x", TOKENS),))
        world.perform(world.core.push(push, world.now, may_wait=False))
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
        world.perform(world.core.producer_disconnected(producer, world.now))
    return world


def a_phase_without_versions(size: int) -> World:
    """A phase has ended, and after it came samples that say no version."""
    world = World()
    world.pushes("p")
    world.perform(world.core.end_phase(1, world.now, "p"))
    world.pushes("p", size)
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
        world.train(step)
        world.hungry()
    return world


def ranks(size: int) -> World:
    """DP ranks hold a step, and wait for the next one, of which samples lack."""
    world = World(batch=size, dp_size=size)
    world.join()
    world.plans = True
    world.pushes("p", size)
    world.hold(0)
    for rank in world.ranks:
        world.perform(world.core.demand(rank, 0, world.now, hungry=True))
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
        producers_away, ended_phases, a_phase_without_versions, held_at_the_soft_cap,
        held_for_an_end, retained_steps, ranks, ranks_at_the_end,
    )
}  # fmt: skip
