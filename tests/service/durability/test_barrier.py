"""The barrier: nothing leaves before what it rests on is durable, and order is kept."""

import asyncio
from functools import partial

from rollout_dispatcher.core.facts import StreamEnded
from rollout_dispatcher.errors import JournalError
from rollout_dispatcher.service.barrier import (
    BYTES_BESIDES_PAYLOAD,
    MAX_UNANSWERED,
    SLOW_SECONDS,
    DurabilityBarrier,
)
from rollout_dispatcher.service.completion import Failure
from tests.service.wires import SlowLog, told


class Chatterbox:
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def hold(self) -> None:
        self.told.append("hold")

    def go_on(self) -> None:
        self.told.append("go on")


async def test_without_a_journal_the_gate_stands_open() -> None:
    barrier, said = DurabilityBarrier(None, Failure()), list[str]()
    barrier.note([StreamEnded()], {})
    barrier.after(partial(said.append, "answer"))
    await barrier.settled()
    assert said == ["answer"]
    assert barrier.failure is None


async def test_an_answer_waits_for_the_facts_noted_before_it_and_order_is_kept() -> None:
    log, said = SlowLog(), list[str]()
    barrier = DurabilityBarrier(log, Failure())
    barrier.after(partial(said.append, "before any fact"))
    barrier.note([StreamEnded()], {"a": 1})
    barrier.after(partial(said.append, "first"))
    barrier.note([StreamEnded()], {})
    barrier.after(partial(said.append, "second"))
    barrier.note([], {})
    barrier.after(partial(said.append, "third"))
    assert said == ["before any fact"]
    await log.durable(1)
    assert said == ["before any fact", "first"]
    await log.durable(2)
    assert said == ["before any fact", "first", "second", "third"]
    assert [totals for _, totals in log.batches] == [{"a": 1}, {}]


async def test_what_is_decided_while_the_barrier_opens_overtakes_nothing_that_waits_there() -> None:
    log, said = SlowLog(), list[str]()
    barrier = DurabilityBarrier(log, Failure())
    barrier.note([StreamEnded()], {})
    barrier.after(lambda: barrier.after(partial(said.append, "consequence")))
    barrier.after(partial(said.append, "second"))
    await log.durable(1)
    assert said == ["second", "consequence"]


async def test_what_a_thunk_adds_waits_for_its_own_facts() -> None:
    log, said = SlowLog(), list[str]()
    barrier = DurabilityBarrier(log, Failure())

    def answer_and_note_more() -> None:
        said.append("answer")
        barrier.note([StreamEnded()], {})
        barrier.after(partial(said.append, "consequence"))

    barrier.note([StreamEnded()], {})
    barrier.after(answer_and_note_more)
    await log.durable(1)
    assert said == ["answer"]
    await log.durable(2)
    assert said == ["answer", "consequence"]


async def test_settled_returns_when_everything_noted_is_durable() -> None:
    log = SlowLog()
    barrier = DurabilityBarrier(log, Failure())
    barrier.note([StreamEnded()], {})
    waiting = asyncio.ensure_future(barrier.settled())
    await asyncio.sleep(0)
    assert not waiting.done()
    await log.durable(1)
    await waiting


async def test_room_is_the_journals_and_without_one_there_is_always_some() -> None:
    log = SlowLog()
    barrier = DurabilityBarrier(log, Failure())
    log.free = 3 * BYTES_BESIDES_PAYLOAD + 100
    assert barrier.has_capacity(3, 100)
    assert log.asked == log.free
    assert not barrier.has_capacity(3, 101)
    assert not barrier.has_capacity(4, 0)
    assert DurabilityBarrier(None, Failure()).has_capacity(10**6, 10**12)


async def test_the_loop_is_told_when_there_may_be_room_again() -> None:
    log, said = SlowLog(), list[str]()
    DurabilityBarrier(log, Failure(), partial(said.append, "capacity"))
    log.on_capacity()
    assert said == []
    await asyncio.sleep(0)
    assert said == ["capacity"]


async def test_a_broken_journal_is_reported_to_the_loop() -> None:
    log, failure = SlowLog(), Failure()
    DurabilityBarrier(log, failure)
    error = JournalError("the disk is gone")
    await told(log.on_broken, error)
    assert failure.error is error


async def test_what_fails_once_it_is_durable_is_reported_and_not_left_to_the_loop() -> None:
    log, failure, said = SlowLog(), Failure(), list[str]()
    barrier = DurabilityBarrier(log, failure)
    barrier.note([StreamEnded()], {})
    error = RuntimeError("our own bug")

    def fail() -> None:
        raise error

    barrier.after(fail)
    barrier.after(partial(said.append, "to somebody else"))
    await log.durable(1)
    assert failure.error is error
    assert said == ["to somebody else"]
    barrier.after(partial(said.append, "at once"))
    assert said == ["to somebody else", "at once"]


async def test_what_fails_at_once_is_reported_too() -> None:
    failure = Failure()

    def fail() -> None:
        raise RuntimeError("our own bug")

    DurabilityBarrier(None, failure).after(fail)
    assert isinstance(failure.error, RuntimeError)


async def test_a_speaker_of_too_many_unanswered_messages_is_held_until_half_are_answered() -> None:
    log, loud, quiet = SlowLog(), Chatterbox(), Chatterbox()
    barrier = DurabilityBarrier(log, Failure())
    barrier.message_handled(loud)  # answered at once
    barrier.note([StreamEnded()], {})
    for message in range(1, MAX_UNANSWERED):
        barrier.message_handled(loud)
        if message == MAX_UNANSWERED // 2:
            barrier.note([StreamEnded()], {})
    assert loud.told == []
    barrier.message_handled(loud)
    barrier.message_handled(quiet)
    assert loud.told == ["hold"]
    await log.durable(1)
    assert loud.told == ["hold", "go on"]
    for _ in range(MAX_UNANSWERED // 2):
        barrier.message_handled(loud)
    assert loud.told == ["hold", "go on", "hold"]
    await log.durable(2)
    assert loud.told == ["hold", "go on", "hold", "go on"]
    assert quiet.told == []


async def test_a_disk_is_slow_while_it_is_and_as_long_again() -> None:
    now = [0.0]
    journal = SlowLog()
    barrier = DurabilityBarrier(journal, Failure(), clock=lambda: now[0])
    barrier.note([StreamEnded()], {})
    now[0] += 0.9 * SLOW_SECONDS
    await journal.durable(1)
    assert not barrier.is_slow(), "as any disk is"
    barrier.note([StreamEnded()], {})
    now[0] += 1.0
    assert barrier.is_slow()
    await journal.durable(2)
    assert barrier.is_slow(), "who waited for it has not answered yet"
    now[0] += 1.1
    assert not barrier.is_slow()
    journal.failure = JournalError("no room")
    assert barrier.is_slow()
