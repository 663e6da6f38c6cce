"""The faults: what is done to a running cluster. Each returns when its disturbance is over."""

from contextlib import ExitStack, suppress
from io import FileIO
from random import Random
from time import monotonic, sleep

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import MAGIC, PREFIX
from tests.chaos.cluster.cluster import Cluster
from tests.chaos.faults.hands import paused
from tests.chaos.faults.strangers import impersonate, stranger

CHUNK = 64 * 1024
#: So few that a full buffer is still several segments of the journal away.
FEW_SAMPLES = 60
#: Seconds by which a clock jumps.
JUMP_S = 60, 10_000
#: A message that does not come within these seconds is not lost.
LOST_WITHIN_S = 2.0
Kinds = tuple[type[m.Message], ...]
#: Messages of either side that may be lost, with the connection.
OF_PRODUCERS: Kinds = m.HelloProducer, m.WelcomeProducer, m.Push, m.Pushed, m.Blocked, m.Ping
OF_RANKS: Kinds = (
    m.HelloRank, m.WelcomeRank, m.StepHeader, m.MicroBatch, m.Prepared, m.Release, m.LastStep,
    m.Demand, m.Finish, m.Commit, m.StepTimes, m.CheckpointSaved, m.Ping,
)  # fmt: skip
#: And of both, where there is a payload store.
OF_STORES: Kinds = m.Free, m.Freed, m.Sweep, m.Swept, m.Unresolved, m.StepWithdrawn


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
    """SIGSTOP, SIGCONT; the dispatcher hears nothing of it meanwhile."""
    with paused(cluster, random.choice(cluster.group.ranks)):
        sleep(random.uniform(0.1, 2.5))


def cut_connections(cluster: Cluster, random: Random) -> None:
    """Some or all connections end, now or in the middle of what comes next."""
    cluster.disturb()
    names = cluster.clients
    for name in random.sample(names, random.randint(1, len(names))):
        cluster.proxies[name].cut(random.choice((0, random.randrange(1, 4000))))


def slow_connections(cluster: Cluster, random: Random) -> None:
    """Some connections become very slow for a while."""
    cluster.disturb()
    names = cluster.clients
    with ExitStack() as stack:
        for name in random.sample(names, random.randint(1, len(names))):
            stack.enter_context(cluster.proxies[name].slow(random.uniform(0.005, 0.05)))
        sleep(random.uniform(0.3, 1.5))


def hold_up_connections(cluster: Cluster, random: Random) -> None:
    """Some connections carry nothing for a while, as when a cable is pulled."""
    cluster.disturb()
    names = cluster.clients
    with ExitStack() as stack:
        for name in random.sample(names, random.randint(1, len(names))):
            stack.enter_context(cluster.proxies[name].held_up())
        sleep(random.uniform(0.3, 2.5))


def lose_messages(cluster: Cluster, random: Random) -> None:
    """A message does not arrive, on some or all connections, and each of these ends with it."""
    cluster.disturb()
    names = cluster.clients
    chosen = random.sample(names, random.randint(1, len(names)))
    for name in chosen:
        kinds = OF_RANKS if name.startswith("rank") else OF_PRODUCERS
        kinds += OF_STORES if cluster.settings.references else ()
        cluster.proxies[name].lose(random.choice(kinds))
    deadline = monotonic() + LOST_WITHIN_S
    for name in chosen:
        cluster.proxies[name].lost.wait(max(deadline - monotonic(), 0))
        cluster.proxies[name].lose(m.Commit, times=0)


def talk_nonsense(cluster: Cluster, random: Random) -> None:
    """Strangers say what is no frame, a frame that is too large, and that they are a rank."""
    cluster.disturb()
    too_large = PREFIX.pack(MAGIC, m.Push.type_code, 0, 8, 1 << 60)
    for said in (random.randbytes(4096), b"GET / HTTP/1.1\r\n\r\n", too_large):
        stranger(cluster, said)
    impersonate(cluster, random.randrange(cluster.size))


def jump_clock_ahead(cluster: Cluster, random: Random) -> None:
    """The dispatcher's clock says minutes or hours more."""
    cluster.jump_clock(random.uniform(*JUMP_S))


def jump_clock_back(cluster: Cluster, random: Random) -> None:
    """The dispatcher's clock says minutes or hours less."""
    cluster.jump_clock(-random.uniform(*JUMP_S))


def restart_before_its_past(cluster: Cluster, random: Random) -> None:
    """A clock that was ahead is right again after a restart: the journal tells of the future."""
    cluster.jump_clock(random.uniform(*JUMP_S))
    cluster.await_recovery()
    cluster.restart_dispatcher()


def fill_disk(cluster: Cluster, random: Random) -> None:
    """Take what is free where the journal is, until the dispatcher says so; then give it back.

    Producers are stopped until the buffer is nearly empty, and ranks before the disk is full: what
    then comes in is more than the segments that the journal has at hand can take, and nothing is
    committed that would free one.
    """
    filler = cluster.disk / "filler"
    with ExitStack() as stack, filler.open("wb", buffering=0) as file:
        stack.callback(filler.unlink)
        with ExitStack() as producers:
            for producer in cluster.producers:
                producers.enter_context(paused(cluster, producer))
            cluster.wait_for(lambda: _buffered(cluster) < FEW_SAMPLES, "the buffer runs empty")
            for rank in cluster.group.ranks:
                stack.enter_context(paused(cluster, rank))
            _fill(file)

        def shows() -> bool:
            _fill(file)  # a segment that was freed meanwhile is room again
            return _refuses_as_full(cluster)

        cluster.wait_for(shows, "a full disk shows")
        cluster.times_full += 1
        sleep(random.uniform(0, 1.5))
    cluster.wait_for(lambda: cluster.scrape().get("journal_failing") == 0, "there is room again")
    cluster.await_ready()


def _fill(file: FileIO) -> None:
    with suppress(OSError):
        while file.write(bytes(CHUNK)):
            pass


def _refuses_as_full(cluster: Cluster) -> bool:
    """Whether all that tells an operator does."""
    found = cluster.scrape()
    counted = found.get("journal_errors_total{reason=full}", 0) >= 1
    return counted and found["journal_failing"] == 1 and cluster.ask("GET", "/readyz") is None


def _buffered(cluster: Cluster) -> float:
    return cluster.scrape().get("buffer_samples", float("inf"))
