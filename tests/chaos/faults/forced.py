"""Faults that are certain: each waits for the moment in which what it does must show.

A campaign's faults hit what they hit. These are for planted bugs: the message whose loss brings a
bug out is lost, the process dies between two things that were to happen together.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic, sleep

from rollout_dispatcher.protocol import messages as m
from tests.chaos.cluster.cluster import POLL_S, Cluster
from tests.chaos.faults.hands import paused

#: Within these seconds what a rank said before it was stopped is heard, or the moment is not it.
SOON_S = 1.5
#: The rank that is disturbed, where it may not be DP rank 0; and the producer.
RANK = PRODUCER = 1

Forced = Callable[[Cluster], None]


# -- messages -------------------------------------------------------------------------------------


def lose(client: str, kind: type[m.Message]) -> Forced:
    """Lose the client's next message of this kind, in whichever direction it goes."""

    def fault(cluster: Cluster) -> None:
        proxy = cluster.proxies[client]
        proxy.lose(kind)
        cluster.wait_for(proxy.lost.is_set, f"a {kind.__name__} is lost")

    return fault


def lose_answers(cluster: Cluster) -> None:
    """Every producer has to push again what was accepted."""
    for at in range(cluster.settings.producers):
        lose(f"producer-{at}", m.Pushed)(cluster)


# -- processes ------------------------------------------------------------------------------------


def kill_after_an_answer(cluster: Cluster) -> None:
    """The dispatcher dies as soon as a producer has heard from it; its ranks do, too."""
    before = _acknowledged(cluster)
    cluster.wait_for(lambda: _acknowledged(cluster) > before, "a push is acknowledged")
    cluster.dispatcher.kill()
    cluster.restart_group()
    cluster.restart_dispatcher()


def kill_with_a_rank_behind(cluster: Cluster) -> None:
    """Ranks die, one before it has trained what another has committed."""
    with _behind(cluster):
        cluster.restart_group()


def rewind_committed_steps(cluster: Cluster) -> None:
    """Ranks die, and go back behind steps that the dispatcher knows to be committed."""
    while True:
        with _ranks_stopped(cluster):
            saved = max(one.saved for group in cluster.groups for one in group.seen)
            at = cluster.look()
            if at and at["steps_committed"] - at["steps_rewound"] - 1 >= saved + 2:
                cluster.restart_group(resume=lambda saved, _: saved)
                return
        cluster.await_steps(1)


def fill_the_buffer(cluster: Cluster) -> None:
    """No rank trains until producers are held back, or should have been."""
    most = cluster.settings.most_buffered
    with _ranks_stopped(cluster):
        cluster.wait_for(
            lambda: (at := cluster.look()) and (at["pushes_held"] or at["buffered"] > most),
            "producers are held back",
        )


def steps(number: int) -> Forced:
    """Nothing happens but so many steps."""
    return lambda cluster: cluster.await_steps(number)


# -- payloads by reference ------------------------------------------------------------------------


def kill_with_an_object_put(cluster: Cluster) -> None:
    """A producer dies when it has put an object, and nobody has heard of it."""
    proxy = cluster.proxies[f"producer-{PRODUCER}"]
    while True:
        with proxy.withheld(m.Push):
            cluster.wait_for(proxy.lost.is_set, "a push is withheld")
            if _has_put(cluster):  # else all of it is small, and in the push itself
                cluster.restart_producer(PRODUCER)
                return


def _has_put(cluster: Cluster) -> bool:
    """Whether an object holds what the producer has just pushed."""
    one = cluster.history().producers[PRODUCER]
    unheard = one.pushed.keys() - one.acknowledged.keys()
    return any(unheard.intersection(names) for names in cluster.store.everything().values())


# -- the moments ----------------------------------------------------------------------------------


@contextmanager
def _behind(cluster: Cluster) -> Iterator[None]:
    """A rank is stopped while it trains a step, which DP rank 0 has committed.

    What it did begin to commit the dispatcher has heard: the oldest open step is the one that it
    has not trained. What DP rank 0 says is heard too, for a dispatcher that is content with that.
    """
    while True:
        cluster.wait_for(lambda: _trains(cluster), "a rank trains")
        with paused(cluster, cluster.group.ranks[RANK]):
            if _trains(cluster) and _soon(lambda: _is_heard(cluster, RANK)):
                # It was released to all, so DP rank 0 trains it as well.
                cluster.wait_for(
                    lambda: _is_ahead(cluster) and _is_heard(cluster, 0), "DP rank 0 is ahead"
                )
                yield
                return


def _trains(cluster: Cluster) -> bool:
    cluster.group.look()
    one = cluster.group.seen[RANK]
    return one.takes.keys() > one.committing.keys()


def _is_ahead(cluster: Cluster) -> bool:
    cluster.group.look()
    first, other = cluster.group.seen[0], cluster.group.seen[RANK]
    return max(first.committed, default=-1) > max(other.committing, default=-1)


def _is_heard(cluster: Cluster, rank: int) -> bool:
    """Whether the dispatcher knows of all that the rank has begun to commit."""
    cluster.group.look()
    said = max(cluster.group.seen[rank].committing, default=-1)
    at = cluster.look()
    return bool(at) and at["ranks"][str(rank)]["committed"] >= said


@contextmanager
def _ranks_stopped(cluster: Cluster) -> Iterator[None]:
    with ExitStack() as stack:
        for rank in cluster.group.ranks:
            stack.enter_context(paused(cluster, rank))
        cluster.group.look()
        yield


def _soon(true: Callable[[], bool]) -> bool:
    deadline = monotonic() + SOON_S
    while not (found := true()) and monotonic() < deadline:
        sleep(POLL_S)
    return found


def _acknowledged(cluster: Cluster) -> int:
    return sum(len(producer.acknowledged) for producer in cluster.history().producers)
