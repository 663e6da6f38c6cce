"""The faults: what is done to a running cluster. Each returns when its disturbance is over."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from random import Random
from time import sleep

from tests.chaos.cluster import Cluster
from tests.chaos.processes import Process, Stalled

CHUNK = 64 * 1024
Fault = Callable[[Cluster, Random], None]


def kill_dispatcher(cluster: Cluster, _: Random) -> None:
    """Kill -9, restarted on its journal."""
    cluster.restart_dispatcher()


def kill_dispatcher_twice(cluster: Cluster, random: Random) -> None:
    """The second time while it recovers, or shortly after."""
    cluster.disturb()
    cluster.dispatcher.kill()
    cluster.dispatcher = cluster.start_dispatcher()
    sleep(random.uniform(0, 1.5))  # it dies at any point of its start
    cluster.restart_dispatcher()


def kill_producer(cluster: Cluster, random: Random) -> None:
    """Kill -9, restarted behind the end of its history."""
    cluster.restart_producer(random.randrange(len(cluster.producers)))


def kill_rank(cluster: Cluster, _: Random) -> None:
    """Kill -9; all ranks are started again as a new generation."""
    cluster.restart_group()


def kill_dispatcher_and_ranks(cluster: Cluster, random: Random) -> None:
    """At once, so that nobody can tell the next dispatcher what was committed."""
    cluster.disturb()
    both = [cluster.dispatcher, *cluster.group.ranks]
    random.shuffle(both)
    for process in both:
        process.kill()
    cluster.restart_group()
    cluster.restart_dispatcher()


def kill_dispatcher_and_producer(cluster: Cluster, random: Random) -> None:
    """At once, so that pushes without an answer stay in doubt."""
    number = random.randrange(len(cluster.producers))
    cluster.dispatcher.kill()
    cluster.restart_producer(number)
    cluster.restart_dispatcher()


def pause_dispatcher(cluster: Cluster, random: Random) -> None:
    """SIGSTOP, SIGCONT."""
    with paused(cluster, cluster.dispatcher):
        sleep(random.uniform(0.1, 2))


def pause_producer(cluster: Cluster, random: Random) -> None:
    """SIGSTOP, SIGCONT; sometimes for longer than its connection lives."""
    with paused(cluster, random.choice(cluster.producers)):
        sleep(random.uniform(0.1, 2.5))


def pause_rank(cluster: Cluster, random: Random) -> None:
    """SIGSTOP, SIGCONT; sometimes for longer than its connection lives."""
    with paused(cluster, random.choice(cluster.group.ranks)):
        sleep(random.uniform(0.1, 2.5))


def old_rank_returns(cluster: Cluster, random: Random) -> None:
    """SIGSTOP, a new generation takes over, SIGCONT: the old rank must be fenced."""
    _replace(cluster, random.randrange(cluster.settings.dp_size), restart=False)


def old_rank_returns_to_new_dispatcher(cluster: Cluster, random: Random) -> None:
    """The same, and the dispatcher that knew it is gone too."""
    _replace(cluster, random.randrange(cluster.settings.dp_size), restart=True)


def cut_connections(cluster: Cluster, random: Random) -> None:
    """Some or all connections end, now or in the middle of what comes next."""
    cluster.disturb()
    names = sorted(cluster.proxies)
    for name in random.sample(names, random.randint(1, len(names))):
        cluster.proxies[name].cut(random.choice((0, random.randrange(1, 4000))))


def slow_connections(cluster: Cluster, random: Random) -> None:
    """Some connections become very slow for a while."""
    cluster.disturb()
    names = sorted(cluster.proxies)
    with ExitStack() as stack:
        for name in random.sample(names, random.randint(1, len(names))):
            stack.enter_context(cluster.proxies[name].slow(random.uniform(0.005, 0.05)))
        sleep(random.uniform(0.3, 1.5))


def hold_up_connections(cluster: Cluster, random: Random) -> None:
    """Some connections carry nothing for a while, as when a cable is pulled."""
    cluster.disturb()
    names = sorted(cluster.proxies)
    with ExitStack() as stack:
        for name in random.sample(names, random.randint(1, len(names))):
            stack.enter_context(cluster.proxies[name].held_up())
        sleep(random.uniform(0.3, 2.5))


def fill_disk(cluster: Cluster, random: Random) -> None:
    """Take what is free where the journal is, until that shows and for a while; give it back.

    Ranks are stopped meanwhile: what they commit would free room again.
    """
    filler = cluster.disk / "filler"
    with ExitStack() as stack:
        for process in cluster.group.ranks:
            stack.enter_context(paused(cluster, process))
        stack.callback(filler.unlink)
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(CHUNK)):
                pass
        # A buffer that is full already has nothing more to write, and shows nothing.
        with suppress(Stalled):
            cluster.wait_for(
                lambda: cluster.ask("GET", "/readyz") is None, "a full disk shows", patience=3
            )
            sleep(random.uniform(0, 1.5))


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        kill_dispatcher,
        kill_rank,
        kill_producer,
        old_rank_returns,
        cut_connections,
        pause_rank,
        kill_dispatcher_and_ranks,
        slow_connections,
        pause_dispatcher,
        kill_dispatcher_twice,
        hold_up_connections,
        kill_dispatcher_and_producer,
        pause_producer,
        old_rank_returns_to_new_dispatcher,
    )
}


#: Faults for a journal on a disk of its own that is small.
DISK_FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (fill_disk, kill_dispatcher, kill_rank, kill_dispatcher_and_ranks)
}


def deck(faults: Iterable[str], random: Random) -> Iterator[str]:
    """Every fault once in random order, then all again: a short run has seen most kinds."""
    names = list(faults)
    while True:
        yield from random.sample(names, len(names))


@contextmanager
def paused(cluster: Cluster, process: Process) -> Iterator[None]:
    """Stopped for the block's time."""
    cluster.disturb()
    process.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.signal(signal.SIGCONT)


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
