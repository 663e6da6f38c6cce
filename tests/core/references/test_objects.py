"""Which objects are needed: samples that lie in them live, or may still come in."""

from functools import partial
from timeit import repeat

import pytest

from rollout_dispatcher.core.buffer import objects
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.sample import Outcome, Sample
from tests.support.core.objects import NBYTES, StoreBench, push_of
from tests.support.samples import make_sample

ACCEPTED, DUPLICATE, REFUSED = Outcome.ACCEPTED, Outcome.DUPLICATE, Outcome.REFUSED
FULL = Outcome.FULL


def needed(bench: StoreBench) -> int:
    return len(bench.core._parts.references.objects)


def unneeded(bench: StoreBench) -> list[str]:
    """The keys on the list of releases."""
    return [item.key for item in bench.memory.remembered().unneeded]


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
