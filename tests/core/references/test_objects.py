"""Which objects are needed: samples that lie in them live, or may still come in."""

from functools import partial
from timeit import repeat

import pytest

from rollout_dispatcher.core.buffer import objects
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.buffer.objects import NeededObjects
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.sample import Outcome, Sample
from tests.support.core.objects import NBYTES, STORE, STORES, StoreBench, push_of, stored
from tests.support.samples import make_sample

ACCEPTED, DUPLICATE, REFUSED = Outcome.ACCEPTED, Outcome.DUPLICATE, Outcome.REFUSED
FULL = Outcome.FULL


def needed(bench: StoreBench) -> int:
    return len(bench.core._parts.references.objects)


def unneeded(bench: StoreBench) -> list[str]:
    """The keys on the list of releases."""
    return [item.key for item in bench.memory.remembered().unneeded]


def test_an_object_is_needed_until_the_last_sample_in_it_is_committed() -> None:
    bench = StoreBench(batch=2)
    bench.join()
    assert bench.send(bench.put("p", 0, 3)) == (ACCEPTED,) * 3
    bench.hungry()
    bench.train(0)
    assert needed(bench) == 1
    assert bench.send(bench.put("p", 3, 1)) == (ACCEPTED,)
    bench.hungry()
    bench.train(1)
    assert (needed(bench), unneeded(bench)) == (0, ["p.1/0", "p.1/3"])


def test_an_object_of_duplicates_or_refused_samples_is_needed_no_more() -> None:
    bench = StoreBench()
    bench.send(bench.put("p", 0, 2))
    assert bench.send(bench.put("p", 0, 2, word="2")) == (DUPLICATE,) * 2
    assert unneeded(bench) == ["p.2/0"]
    assert bench.send(bench.put("p", 2, 1, tokens=1001)) == (REFUSED,)
    assert unneeded(bench) == ["p.2/0", "p.1/2"]
    assert needed(bench) == 1


def test_what_a_producer_pushes_that_never_raises_its_floor_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(objects, "MAX_PENDING_PER_PRODUCER", 100)
    bench = StoreBench(batch=2, window=2, capacity=2)
    bench.send(bench.put("q", 0, 2))
    for at in range(300):
        assert bench.send(bench.put("p", at, 1), may_hold=False) == (FULL,)
    assert needed(bench) == 1 + 100
    assert bench.core._parts.references.objects.nbytes == NBYTES * 102
    assert unneeded(bench) == [], "they are the producer's, and may come again"
    bench.join()
    bench.hungry()
    bench.train(0)
    assert bench.send(bench.put("p", 299, 1), may_hold=False) == (ACCEPTED,)
    assert bench.send(bench.put("p", 300, 1, floor=300), may_hold=False) == (ACCEPTED,)
    assert needed(bench) == 2, "what its floor has passed does not come again"
    assert len(unneeded(bench)) == 1 + 100


def test_what_producers_leave_behind_who_may_come_back_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(objects, "MAX_PENDING", 10)
    bench = StoreBench(batch=2, window=2, capacity=2)
    bench.send(bench.put("q", 0, 2))
    for at in range(30):
        assert bench.send(bench.put(f"p{at}", 0, 2)) is None, "it waits"
        bench.lose(f"p{at}")
    assert needed(bench) <= 1 + 6


def test_a_push_takes_no_longer_however_many_are_awaited() -> None:
    """Without looking at those that are not below its floor; it took 0.3 s with 100,000."""
    bench = StoreBench()
    known = bench.core._parts.references.objects
    sample = make_sample("s", 4)
    for at in range(50_000):
        known.pushed(push_of("p", at, f"p.1/{at}", [sample]))
    again = push_of("p", 7, "p.1/7", [sample])
    seconds = min(repeat(partial(known.pushed, again), repeat=3, number=1))
    assert seconds < 0.005


def test_what_is_awaited_of_one_that_is_there_still_is_not_after_the_end() -> None:
    bench = StoreBench(batch=2)
    bench.join()
    bench.connect("p")
    bench.send(bench.put("p", 0, 2))
    bench.crash()
    bench.connect("p")
    bench.join()
    bench.hungry()
    bench.train(0)
    assert needed(bench) == 1, "some of its push may come again"
    bench.perform(bench.core.end_stream(bench.now, "p"))
    bench.hungry()
    assert needed(bench) == 0


def test_what_was_answered_full_comes_again() -> None:
    objects = NeededObjects(STORES)
    push = push_of("p", 0, "p.1/0", [make_sample("a"), make_sample("b")])
    objects.pushed(push)
    objects.not_accepted(push, 0, Outcome.REFUSED)
    objects.not_accepted(push, 1, Outcome.FULL)
    assert objects.pop_unneeded() == ()
    objects.pushed(push_of("p", 5, "p.1/5", []))
    assert (STORE, "p.1/0") in objects
    last = push_of("p", 6, "p.1/6", [])
    last.floor = 2
    objects.pushed(last)
    assert objects.pop_unneeded() == (stored("p.1/0", 2),), "its numbers never come again"


def test_dropped_samples_need_nothing() -> None:
    bench = StoreBench(drop_above=8, batch=1)
    bench.join()
    bench.send(bench.put("p", 0, 2, tokens=9))
    bench.hungry()
    assert bench.dropped(DropReason.OVERSIZE) == 2
    assert unneeded(bench) == ["p.1/0"]


def test_retained_steps_need_theirs_until_a_checkpoint_covers_them() -> None:
    bench = StoreBench(batch=2, retain=True)
    bench.connect("p")
    bench.join()
    bench.send(bench.put("p", 0, 2))
    bench.hungry()
    bench.train(0)
    assert unneeded(bench) == []
    bench.crash()
    assert (needed(bench), unneeded(bench)) == (1, [])
    bench.join()
    bench.perform(bench.core.checkpoint_saved(0, 0))
    assert unneeded(bench) == [], "its producer may have had others in it that nobody heard of"
    bench.lose("p", for_good=True)
    assert unneeded(bench) == ["p.1/0"]


def test_objects_of_other_stores_are_nobody_s_to_release() -> None:
    objects = NeededObjects(frozenset({"file:///other"}))
    push = push_of("p", 0, "p.1/0", [make_sample("a")])
    objects.pushed(push)
    objects.not_accepted(push, 0, Outcome.REFUSED)
    assert objects.pop_unneeded() == ()


def test_two_pushes_into_one_object_are_counted_together() -> None:
    objects = NeededObjects(STORES)
    for producer in "pq":
        push = push_of(producer, 0, "p.1/0", [make_sample(producer)])
        objects.pushed(push)
        objects.accepted(push, [Entry(push.samples[0], ord(producer), 0.0)], range(1))
    assert (len(objects), objects.nbytes) == (1, 32)
    objects.done([Entry(push.samples[0], 0, 0.0)])
    assert objects.pop_unneeded() == ()
    objects.done([Entry(push.samples[0], 1, 0.0)])
    assert len(objects.pop_unneeded()) == 1
    assert objects.nbytes == 0


def web(count: int) -> list[Sample]:
    """Samples of a client without numbers or a name, each in an object of its own."""
    names = (f"web/{at}" for at in range(count))
    return [push_of("", 0, name, [make_sample(name)]).samples[0] for name in names]


def test_what_is_refused_over_http_is_needed_no_more() -> None:
    bench = StoreBench()
    (sample,) = web(1)
    assert bench.send_over_http([sample._replace(tokens=1001)]) == (REFUSED,)
    assert (needed(bench), unneeded(bench)) == (0, ["web/0"])
    elsewhere = Reference(StoredObject("file:///other", "web/1", 32), 0, 32)
    assert bench.send_over_http([sample._replace(payload=elsewhere)]) == (REFUSED,)
    assert unneeded(bench) == ["web/0"]


def test_what_a_shutdown_turns_away_is_its_producers_and_may_be_pushed_again() -> None:
    bench = StoreBench(batch=2, window=2, capacity=2)
    samples = web(3)
    assert bench.send_over_http(samples[:2]) == (ACCEPTED, ACCEPTED)
    assert bench.send(bench.put("p", 0, 2)) is None, "it waits"
    bench.perform(bench.core.drain(bench.now))
    assert bench.send(bench.put("p", 2, 1)) == (REFUSED,)
    assert unneeded(bench) == ["web/0", "web/1"], "which are dropped, as no ranks are there"
    assert bench.send_over_http(samples[2:]) == (REFUSED,), "and nobody says that it may come again"
    assert unneeded(bench) == [f"web/{at}" for at in range(3)]
