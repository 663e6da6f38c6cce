"""Which faults there are for which run, and in which order they come."""

from collections.abc import Callable, Iterable, Iterator
from random import Random

from tests.chaos.cluster.cluster import Cluster
from tests.chaos.faults.campaign import (
    cut_connections,
    fill_disk,
    hold_up_connections,
    jump_clock_ahead,
    jump_clock_back,
    kill_dispatcher,
    kill_dispatcher_and_producer,
    kill_dispatcher_and_ranks,
    kill_dispatcher_twice,
    kill_producer,
    kill_rank,
    lose_messages,
    pause_dispatcher,
    pause_producer,
    pause_rank,
    restart_before_its_past,
    slow_connections,
    talk_nonsense,
)
from tests.chaos.faults.groups import (
    old_rank_returns,
    old_rank_returns_to_new_dispatcher,
    other_dp_size,
    other_dp_size_and_new_dispatcher,
    rewind,
    rewind_and_kill_dispatcher,
    rewind_to_other_dp_size,
)
from tests.chaos.faults.references import (
    delete_object,
    hide_store,
    kill_dispatcher_before_release,
    kill_producer_before_push,
    kill_rank_before_word,
    kill_store_before_fetch,
    kill_store_before_push,
    kill_store_before_release,
    kill_store_before_word,
    restart_without_store,
)

Fault = Callable[[Cluster, Random], None]


def named(*faults: Fault) -> dict[str, Fault]:
    """By the names that a run is told of."""
    return {fault.__name__: fault for fault in faults}


FAULTS: dict[str, Fault] = named(
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
    jump_clock_ahead,
    jump_clock_back,
    restart_before_its_past,
    lose_messages,
    talk_nonsense,
    other_dp_size,
    other_dp_size_and_new_dispatcher,
)

#: Faults while the ranks save checkpoints and go back to them.
REWINDS: dict[str, Fault] = named(
    rewind,
    kill_dispatcher,
    rewind_and_kill_dispatcher,
    lose_messages,
    rewind_to_other_dp_size,
    kill_dispatcher_and_ranks,
    other_dp_size,
)

#: Faults while ranks train samples together.
BLOCKS: dict[str, Fault] = named(
    kill_rank,
    kill_dispatcher,
    rewind,
    old_rank_returns,
    kill_dispatcher_and_ranks,
    cut_connections,
    rewind_and_kill_dispatcher,
    lose_messages,
    other_dp_size,
    rewind_to_other_dp_size,
)

#: Faults while most samples lie in a payload store.
REFERENCES: dict[str, Fault] = named(
    delete_object,
    hide_store,
    kill_producer_before_push,
    kill_rank_before_word,
    kill_dispatcher_before_release,
    restart_without_store,
    kill_dispatcher,
    kill_dispatcher_twice,
    kill_dispatcher_and_producer,
    kill_dispatcher_and_ranks,
    kill_producer,
    kill_rank,
    cut_connections,
    lose_messages,
    pause_rank,
    old_rank_returns,
    other_dp_size,
    other_dp_size_and_new_dispatcher,
)

#: And where an engine has the objects, which is a process that may die. None is stopped for as long
#: as others take to start: a master takes a process with memory for gone that it does not hear.
ENGINES = named(
    kill_store_before_push,
    kill_store_before_fetch,
    kill_store_before_word,
    kill_store_before_release,
) | {name: fault for name, fault in REFERENCES.items() if fault is not restart_without_store}

#: Both: objects are kept until a checkpoint covers what is in them.
REFERENCES_AND_REWINDS = REWINDS | named(
    delete_object,
    hide_store,
    kill_producer_before_push,
    kill_rank_before_word,
    kill_dispatcher_before_release,
)

#: Faults while torchrun trains. It kills a rank that is stopped while others end, so that none can
#: come back.
TORCHRUN_FAULTS: dict[str, Fault] = named(
    kill_rank,
    kill_dispatcher,
    pause_rank,
    cut_connections,
    kill_dispatcher_and_ranks,
    hold_up_connections,
    other_dp_size,
)

#: Faults for a journal on a disk of its own that is small.
DISK_FAULTS: dict[str, Fault] = named(
    fill_disk, kill_dispatcher, kill_rank, kill_dispatcher_and_ranks
)


def deck(faults: Iterable[str], random: Random) -> Iterator[str]:
    """Every fault once in random order, then all again: a short run has seen most kinds."""
    names = list(faults)
    while True:
        yield from random.sample(names, len(names))
