"""Faults of payloads by reference: of objects, of their store, and between two words about them."""

from collections.abc import Callable
from contextlib import ExitStack
from random import Random
from time import monotonic, sleep

from rollout_dispatcher.protocol import messages as m
from tests.chaos.cluster.cluster import Cluster
from tests.chaos.faults.hands import paused

#: Of the objects that came last, one is deleted: hardly any rank has fetched it yet.
NEWEST = 12
#: A word that is not said within these seconds is not waited for.
SAID_WITHIN_S = 5.0
#: What a process has said to an engine before it was stopped has arrived by then.
ARRIVES_WITHIN_S = 0.2


def delete_object(cluster: Cluster, random: Random) -> None:
    """An object is removed behind everybody's back; ranks find out, or have it already."""
    cluster.disturb()

    def is_deleted() -> bool:
        keys = cluster.store.keys()[-NEWEST:]
        return bool(keys) and cluster.store.delete(random.choice(keys))

    cluster.wait_for(is_deleted, "an object can be removed")


def hide_store(cluster: Cluster, random: Random) -> None:
    """The store cannot be reached for a while, as when its mount is gone; nothing is lost of it."""
    cluster.disturb()
    with cluster.store.away(random):
        sleep(random.uniform(0.3, 2.5))


def restart_without_store(cluster: Cluster, random: Random) -> None:
    """The same while ranks, a producer or the dispatcher are killed and come back."""
    cluster.disturb()
    restarts: tuple[Callable[[], None], ...] = (
        cluster.restart_group,
        cluster.restart_dispatcher,
        lambda: cluster.restart_producer(random.randrange(len(cluster.producers))),
    )
    with cluster.store.away(random):
        random.choice(restarts)()
        sleep(random.uniform(0.3, 2.5))


def kill_producer_before_push(cluster: Cluster, random: Random) -> None:
    """A producer is killed when it has put an object, and nobody has heard of it."""
    number = random.randrange(len(cluster.producers))
    _when_withheld(
        cluster, [f"producer-{number}"], m.Push, lambda: cluster.restart_producer(number)
    )


def kill_rank_before_word(cluster: Cluster, random: Random) -> None:
    """Ranks are killed when one of them has fetched a step, or trained it, and nobody knows."""
    rank = f"rank-{random.randrange(cluster.size)}"
    _when_withheld(cluster, [rank], random.choice((m.Prepared, m.Commit)), cluster.restart_group)


def kill_dispatcher_before_release(cluster: Cluster, random: Random) -> None:
    """The dispatcher is killed between a commit and the release of what it has used up."""
    kind = random.choice((m.Free, m.Freed))
    _when_withheld(cluster, cluster.clients, kind, cluster.restart_dispatcher)


def kill_store_before_push(cluster: Cluster, random: Random) -> None:
    """The objects go when a producer has put one, and nobody has heard of it."""
    producer = f"producer-{random.randrange(len(cluster.producers))}"
    _when_withheld(cluster, [producer], m.Push, lambda: _kill_store(cluster, random))


def kill_store_before_fetch(cluster: Cluster, random: Random) -> None:
    """They go when a rank was told of a step, and fetched nothing, while others may have."""
    rank = f"rank-{random.randrange(cluster.size)}"
    _when_withheld(cluster, [rank], m.MicroBatch, lambda: _kill_store(cluster, random))


def kill_store_before_word(cluster: Cluster, random: Random) -> None:
    """They go when a rank has fetched a step, or trained it, and nobody knows."""
    rank = f"rank-{random.randrange(cluster.size)}"
    kind = random.choice((m.Prepared, m.Commit))
    _when_withheld(cluster, [rank], kind, lambda: _kill_store(cluster, random))


def kill_store_before_release(cluster: Cluster, random: Random) -> None:
    """They go when a worker is to release some of them."""
    kind = random.choice((m.Free, m.Freed))
    _when_withheld(cluster, cluster.clients, kind, lambda: _kill_store(cluster, random))


def _kill_store(cluster: Cluster, random: Random) -> None:
    """While nobody puts anything, so that it is known what goes."""
    with ExitStack() as stack:
        for producer in cluster.producers:
            stack.enter_context(paused(cluster, producer))
        sleep(ARRIVES_WITHIN_S)
        # Of what a producer is just putting, the engine may have the bytes and not the key.
        cluster.store.deleted |= _under_way(cluster)
        cluster.store.kill(random)
        cluster.disturb()


def _under_way(cluster: Cluster) -> set[str]:
    """Samples of pushes that are not answered."""
    producers = cluster.history().producers
    return {name for one in producers for name in one.pushed if name not in one.acknowledged}


def _when_withheld(
    cluster: Cluster, clients: list[str], kind: type[m.Message], then: Callable[[], None]
) -> None:
    """Do it when one of these clients said, or was to hear, a message that does not arrive."""
    cluster.disturb()
    proxies = [cluster.proxies[name] for name in clients]
    with ExitStack() as stack:
        for proxy in proxies:
            stack.enter_context(proxy.withheld(kind))
        deadline = monotonic() + SAID_WITHIN_S
        while not any(proxy.lost.is_set() for proxy in proxies) and monotonic() < deadline:
            sleep(0.01)
        then()
