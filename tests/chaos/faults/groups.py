"""Faults in which one process group of ranks takes the place of another."""

from random import Random
from time import sleep

from tests.chaos.cluster.cluster import Cluster
from tests.chaos.faults.hands import paused


def old_rank_returns(cluster: Cluster, random: Random) -> None:
    """SIGSTOP, a new generation takes over, SIGCONT: the old rank must be fenced."""
    _replace(cluster, random.randrange(cluster.size), restart=False)


def old_rank_returns_to_new_dispatcher(cluster: Cluster, random: Random) -> None:
    """The same, and the dispatcher that knew it is gone too."""
    _replace(cluster, random.randrange(cluster.size), restart=True)


def other_dp_size(cluster: Cluster, random: Random) -> None:
    """All ranks are killed, and come back as fewer or more."""
    cluster.restart_group(size=_other_size(cluster, random))


def other_dp_size_and_new_dispatcher(cluster: Cluster, random: Random) -> None:
    """The same, and the dispatcher is killed, too."""
    cluster.restart_group(size=_other_size(cluster, random))
    cluster.restart_dispatcher()


def rewind(cluster: Cluster, random: Random) -> None:
    """All ranks are killed, and go on from a checkpoint, the last one that is saved or a later."""
    cluster.restart_group(resume=random.randint)


def rewind_and_kill_dispatcher(cluster: Cluster, random: Random) -> None:
    """The same, and the dispatcher is killed before them, or while they come back."""
    early = random.random() < 0.5
    if early:
        cluster.dispatcher.kill()
    cluster.restart_group(resume=random.randint)
    if not early:
        sleep(random.uniform(0, 1))
    cluster.restart_dispatcher()


def rewind_to_other_dp_size(cluster: Cluster, random: Random) -> None:
    """All ranks are killed, and fewer or more go on from a checkpoint."""
    cluster.restart_group(size=_other_size(cluster, random), resume=random.randint)


def _other_size(cluster: Cluster, random: Random) -> int:
    return random.choice([size for size in cluster.settings.dp_sizes if size != cluster.size])


def _replace(cluster: Cluster, rank: int, *, restart: bool) -> None:
    old = cluster.group
    process = old.ranks[rank]
    with paused(cluster, process):
        cluster.restart_group(spared=rank)
        if restart:
            cluster.restart_dispatcher()
        cluster.await_recovery()
    cluster.returned.add((old.launch, rank))
    # What comes of it is for the checker to judge; here it only gets the time.
    patience = min(cluster.settings.patience_s, 10)
    cluster.settle(process, patience)
