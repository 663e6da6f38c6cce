"""Bugs in what becomes of pushes: what was acknowledged, and what is said again."""

from collections.abc import Callable, Sequence
from time import sleep

from rollout_dispatcher.core.admission.producers import DuplicateMemory
from rollout_dispatcher.journal.store import Store
from rollout_dispatcher.service.barrier import DurabilityBarrier
from tests.chaos.planted.plant import forget_facts, plant, planted

#: A slow disk: what is acknowledged early is in danger for so long.
SYNC_S = 1.0


@planted
def acknowledge_before_durable() -> None:
    """P1: answers leave at once, while their facts are on the way to a slow disk."""
    sync = Store.sync

    def slow_sync(store: Store) -> None:
        sleep(SYNC_S)
        sync(store)

    def at_once(_: DurabilityBarrier, then: Callable[[], None]) -> None:
        then()

    plant(Store, "sync", slow_sync)
    plant(DurabilityBarrier, "after", at_once)


@planted
def forget_duplicates() -> None:
    """P3, Push: one that is sent again, as its answer was lost, is stored again."""
    plant(DuplicateMemory, "seen", lambda *_: False)
    plant(DuplicateMemory, "are_new", lambda *_: True)


@planted
def forget_ids() -> None:
    """P3, Push: what another process of a producer pushes again under its ids is stored again."""
    seen, are_new = DuplicateMemory.seen, DuplicateMemory.are_new

    def nameless(memory: DuplicateMemory, producer: str, seq: int, _: str | None) -> bool:
        return seen(memory, producer, seq, None)

    def all_nameless(
        memory: DuplicateMemory, producer: str, numbers: range, _: Sequence[str]
    ) -> bool:
        return are_new(memory, producer, numbers, ())

    plant(DuplicateMemory, "seen", nameless)
    plant(DuplicateMemory, "are_new", all_nameless)


@planted
def forget_the_end() -> None:
    """P8, EndStream: that the stream has ended is not made durable."""
    forget_facts("StreamEnded", "ProducerSaid")
