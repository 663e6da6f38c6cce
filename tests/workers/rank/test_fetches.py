"""What a DP rank fetches, when, and what it says of it."""

from typing import Any

from rollout_dispatcher.protocol import messages as m
from rollout_workers.rank.core import RankCore
from rollout_workers.rank.held_steps import Fetch
from tests.support.samples import span_of
from tests.workers.rank import cores
from tests.workers.rank.cores import NOTHING, deliver, reconnect, take
from tests.workers.rank.cores import spoken as said
from tests.workers.support.peers import sample, step
from tests.workers.support.stored import referenced

ONE = sample([1, 2, 3], name="one")
#: Bytes of its span.
NBYTES = ONE.nbytes
#: The same in a store.
(THERE,) = referenced([ONE])


WELCOME: dict[str, Any] = {"max_open_steps": 4, "payload_stores": ["file:///nowhere"]}


def connected(**welcome: Any) -> RankCore:
    return cores.connected(prefetch=4, **WELCOME, **welcome)


def announce(core: RankCore, number: int, count: int = 1, *, refs: int = 1) -> None:
    header = step(number, count).model_copy(update={"num_referenced": refs})
    core.receive(header, NOTHING, 0.0)


def lie_there(core: RankCore, number: int) -> None:
    """A step of one micro-batch, of one sample in a store, arrives."""
    announce(core, number)
    deliver(core, number, 0, THERE)


def find(core: RankCore, fetch: Fetch) -> None:
    core.found(fetch, memoryview(bytes(span_of(ONE))))


def prepared(number: int) -> m.Prepared:
    return m.Prepared(step=number, digest="d")


def steps_of(fetches: list[Fetch]) -> list[int]:
    return [fetch.held.header.step for fetch in fetches]


def indexes_of(fetches: list[Fetch]) -> list[tuple[int, int]]:
    """The step and the micro-batch of each."""
    return [(fetch.held.header.step, fetch.received.header.index) for fetch in fetches]


def test_a_step_is_prepared_once_all_of_it_is_here_and_fetched() -> None:
    core = connected()
    announce(core, 0, 2)
    deliver(core, 0, 0, THERE)
    assert (said(core), core.take_fetches()) == ([], [])
    deliver(core, 0, 1, ONE)
    (fetch,) = core.take_fetches()
    assert core.take_fetches() == []
    assert [reference.nbytes for reference in fetch.references] == [NBYTES]
    assert said(core) == []
    find(core, fetch)
    assert said(core) == [prepared(0)]


def test_a_step_without_references_is_prepared_at_once_but_behind_those_before_it() -> None:
    core = connected()
    announce(core, 0, refs=0)
    assert said(core) == [prepared(0)]
    lie_there(core, 1)
    announce(core, 2, refs=0)
    assert said(core) == []
    find(core, *core.take_fetches())
    assert said(core) == [prepared(1), prepared(2)]


def test_what_a_loop_gets_is_as_if_it_had_come_inline() -> None:
    core = connected()
    lie_there(core, 0)
    find(core, *core.take_fetches())
    core.receive(m.Release(step=0), NOTHING, 0.0)
    held = core.ready()
    assert held is not None
    assert held.micro_batches[0].payload == span_of(ONE)
    assert [block.rows for block in held.micro_batches[0].blocks] == [3, 3, 1]


def test_steps_are_fetched_ahead_as_far_as_they_fit_and_in_their_turn() -> None:
    core = connected(prefetch_bytes=2 * NBYTES)
    for number in range(3):
        lie_there(core, number)
    fetches = core.take_fetches()
    assert steps_of(fetches) == [0, 1]
    for fetch in fetches:
        find(core, fetch)
    assert core.take_fetches() == []  # what is fetched and not begun takes room too
    core.receive(m.Release(step=0), NOTHING, 0.0)
    take(core)
    assert steps_of(core.take_fetches()) == [2]


def test_the_step_that_the_loop_waits_for_is_fetched_whatever_its_size() -> None:
    core = connected(prefetch_bytes=NBYTES - 1)
    lie_there(core, 0)
    lie_there(core, 1)
    assert core.take_fetches() == []
    core.demand(hungry=True)
    (fetch,) = core.take_fetches()
    assert steps_of([fetch]) == [0]
    assert core.take_fetches() == []
    find(core, fetch)
    core.receive(m.Release(step=0), NOTHING, 0.0)
    take(core)
    assert core.take_fetches() == []  # it does not wait any more


def test_of_a_step_that_does_not_fit_as_many_micro_batches_are_fetched_ahead_as_do() -> None:
    core = connected(prefetch_bytes=3 * NBYTES)
    for number, count in ((0, 2), (1, 3)):
        announce(core, number, count)
        for index in range(count):
            deliver(core, number, index, THERE)
    fetches = core.take_fetches()
    assert indexes_of(fetches) == [(0, 0), (0, 1), (1, 0)]
    for fetch in fetches:
        find(core, fetch)
    assert said(core) == [prepared(0)]
    core.receive(m.Release(step=0), NOTHING, 0.0)
    take(core)
    assert indexes_of(core.take_fetches()) == [(1, 1), (1, 2)]


def test_what_is_gone_is_not_named_while_others_of_its_step_were_not_looked_for() -> None:
    core = connected(prefetch_bytes=NBYTES)
    announce(core, 0, 2)
    for index, name in enumerate(("one", "two")):
        deliver(core, 0, index, *referenced([sample([1, 2, 3], name=name)]))
    (first,) = core.take_fetches()
    core.missed(first, {"one": "gone"})
    assert said(core) == []
    core.demand(hungry=True)
    (second,) = core.take_fetches()
    core.missed(second, {"two": "gone"})
    (message,) = [it for it in said(core) if not isinstance(it, m.Demand)]
    assert isinstance(message, m.Unresolved)
    assert message.sample_ids == ["one", "two"]


def test_a_hello_tells_of_resolved_steps_alone_and_the_rest_is_told_when_it_comes_again() -> None:
    core = connected()
    announce(core, 0, refs=0)
    deliver(core, 0, 0, ONE)
    for number in (1, 2):
        lie_there(core, number)
    first, second = core.take_fetches()
    find(core, second)
    assert core.hello().received == [(0, 1)]
    reconnect(core, **WELCOME)
    find(core, first)
    said(core)
    assert core.hello().received == [(0, 1), (1, 1), (2, 1)]
    reconnect(core, **WELCOME)
    lie_there(core, 1)
    assert said(core) == [prepared(1)]
    assert core.take_fetches() == []


def test_what_is_unresolved_is_said_again_when_the_step_comes_again() -> None:
    core = connected()
    lie_there(core, 0)
    (fetch,) = core.take_fetches()
    core.missed(fetch, {"one": "gone"})
    said(core)
    reconnect(core, **WELCOME)
    lie_there(core, 0)
    assert [type(message) for message in said(core)] == [m.Unresolved]


def test_what_comes_for_a_step_that_is_not_held_any_more_changes_nothing() -> None:
    core = connected()
    lie_there(core, 0)
    (fetch,) = core.take_fetches()
    core.resume(m.CheckpointPosition(run_id="run", step=3))
    assert not core.wanted(fetch)
    find(core, fetch)
    core.missed(fetch, {"one": "gone"})
    assert core.hello().received == []


def test_requests_are_answered_on_the_connection_on_which_they_came() -> None:
    core = connected()
    free = m.Free(number=3, store="file:///a", keys=["k"])
    core.receive(free, NOTHING, 0.0)
    (asked,) = core.store_requests.take()
    core.store_requests.answered(asked, m.Freed(number=3))
    assert said(core) == [m.Freed(number=3)]
    core.receive(free, NOTHING, 0.0)
    core.receive(m.Sweep(number=4, store="file:///a", prefix="p."), NOTHING, 0.0)
    first, second = core.store_requests.take()
    core.store_requests.answered(second, m.Swept(number=4))
    reconnect(core, **WELCOME)
    core.store_requests.answered(first, m.Freed(number=3))
    assert said(core) == []
