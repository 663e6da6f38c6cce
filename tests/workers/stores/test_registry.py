"""A client opens what the dispatcher allows, and nothing else."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from rollout_dispatcher.errors import StoreFailed
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_workers.stores import registry
from rollout_workers.stores.file import FileStore
from rollout_workers.stores.interface import Part
from rollout_workers.stores.registry import PAUSE_MOST_S, OpenedStores
from tests.support.server import eventually
from tests.workers.support.stored import make_store


class Full(FileStore):
    """A store that takes nothing."""

    def put(self, key: str, spans: Sequence[Buffer]) -> StoredObject:
        """Fail in its own way."""
        raise RuntimeError(f"no room for {key} in {len(spans)}")


class Slow(FileStore):
    """A store that lists when a test lets it, and knows whether it is closed."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.listing, self.may_end = threading.Event(), threading.Event()
        self.closed = 0

    def list(self, prefix: str) -> list[str]:
        """Not before it may."""
        self.listing.set()
        self.may_end.wait()
        return super().list(prefix)

    def close(self) -> None:
        """Count how often."""
        self.closed += 1
        super().close()


@pytest.fixture
def stores(store: FileStore) -> OpenedStores:
    found = OpenedStores()
    found.allow([store.address])
    return found


def test_what_could_not_be_opened_is_tried_again(stores: OpenedStores, store: FileStore) -> None:
    later = store.address + "-later"
    stores.allow([later])
    with pytest.raises(StoreFailed, match="no directory"):
        stores.list(later, "")
    make_store(later)
    assert stores.list(later, "") == []


def test_references_into_several_stores_come_back_in_order(store: FileStore) -> None:
    other = make_store(store.address + "-other")
    one, two = store.put("k", [b"1" * 8 + b"2" * 8]), other.put("k", [b"3" * 8])
    opened = OpenedStores()
    opened.allow([store.address, other.address])
    asked = [Reference(one, 8, 8), Reference(two, 0, 8), Reference(one, 0, 8)]
    memory = memoryview(bytearray(24))
    parts = [[Part(0, start, 8)] for start in (0, 8, 16)]
    assert opened.get_into(asked, memory, parts) == [None] * 3
    assert bytes(memory) == b"2" * 8 + b"3" * 8 + b"1" * 8


def test_an_object_goes_into_the_first_store_that_takes_it(store: FileStore) -> None:
    last = make_store(store.address + "-last")
    gone = "file:///nowhere"

    def opener(address: str) -> FileStore:
        return (Full if address == store.address else FileStore).open(address)

    opened = OpenedStores(opener)
    opened.allow([gone, store.address, last.address])
    assert opened.put("k", [b"x"]) == StoredObject(last.address, "k", 1)
    opened.allow([gone, store.address])
    with pytest.raises(StoreFailed, match=r"RuntimeError.*no room for k"):
        opened.put("k", [b"x"])


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (None, "no StoredObject but None"),
        (StoredObject("file:///other", "k", 3), "was given 3 bytes"),
        (StoredObject("", "k", 2), "was given 3 bytes"),
        (StoredObject("", "x" * 513, 3), "no push can name"),
        (StoredObject("", "", 3), "no push can name"),
        (StoredObject("", "k", 3.0), "no push can name"),  # type: ignore[arg-type]
    ],
)
def test_a_put_that_returns_what_no_push_can_say_has_failed(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, found: StoredObject | None, why: str
) -> None:
    def put(store: FileStore, *_: object) -> StoredObject | None:
        """What a store of somebody's may do that has a mistake in it."""
        return found and replace(found, store=found.store or store.address)

    monkeypatch.setattr(FileStore, "put", put)
    opened = OpenedStores(FileStore.open)
    opened.allow([store.address])
    with pytest.raises(StoreFailed, match=why):
        opened.put("k", [b"x", b"yz"])


class Unreachable:
    """Opens nothing, after so many seconds of a clock of its own."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s, self.now, self.asked = takes_s, 0.0, list[str]()

    def __call__(self, address: str) -> FileStore:
        self.asked.append(address)
        self.now += self.takes_s
        raise StoreFailed(address, "nobody answers")


@pytest.mark.parametrize(("takes_s", "asked"), [(0.01, 3), (20, 1)])
def test_no_push_waits_for_a_store_that_has_just_failed_to_answer(
    takes_s: float, asked: int
) -> None:
    opener = Unreachable(takes_s)
    opened = OpenedStores(opener, clock=lambda: opener.now)
    opened.allow(["file:///nowhere"])
    for _ in range(3):
        with pytest.raises(StoreFailed, match="nobody answers"):
            opened.put("k", [b"x"])
    assert len(opener.asked) == asked
    with pytest.raises(StoreFailed, match="nobody answers"):
        opened.list("file:///nowhere", "")
    assert len(opener.asked) == asked + 1, "only what has somewhere else to go does not wait"
    opener.now += PAUSE_MOST_S
    with pytest.raises(StoreFailed, match="nobody answers"):
        opened.put("k", [b"x"])
    assert len(opener.asked) == asked + 2


def test_who_has_waited_for_another_ones_attempt_makes_none_of_its_own() -> None:
    may, clocked = threading.Event(), list[int]()
    asked, failures = list[str](), list[StoreFailed]()

    def opener(address: str) -> FileStore:
        asked.append(address)
        assert may.wait(20)
        raise StoreFailed(address, "nobody answers")

    def clock() -> float:
        clocked.append(1)
        return len(clocked)

    def look() -> None:
        try:
            opened.list("file:///nowhere", "")
        except StoreFailed as error:
            failures.append(error)

    opened = OpenedStores(opener, clock)
    opened.allow(["file:///nowhere"])
    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(clocked) == 4, "all of them wait")
    may.set()
    for thread in threads:
        thread.join()
    assert (len(asked), len(failures)) == (1, 4)


def test_no_engine_is_closed_while_a_call_is_in_it(store: FileStore) -> None:
    slow = Slow.open(store.address)
    opened = OpenedStores(lambda _: slow)
    opened.allow([store.address])
    with ThreadPoolExecutor(1) as threads:
        listed = threads.submit(opened.list, store.address, "")
        slow.listing.wait()
        opened.close()
        closed_early = slow.closed
        with pytest.raises(StoreFailed, match="is closed"):
            opened.list(store.address, "")
        slow.may_end.set()
        assert closed_early == 0
        assert listed.result() == []
    assert slow.closed == 1
    opened.close()
    assert slow.closed == 1


# -- by the scheme of their address; third parties name theirs in an entry point


class TheirStore(FileStore):
    """A third party's."""

    scheme = "theirs"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distributions that name stores."""
    named = {
        "theirs": f"{__name__}:TheirStore",
        "broken": "no_such_package.stores:Store",
        "wrong": "pathlib:Path",
    }

    def entry_points(group: str, name: str | None = None) -> list[EntryPoint]:
        return [
            EntryPoint(scheme, value, group)
            for scheme, value in named.items()
            if name in (None, scheme)
        ]

    assert registry.ENTRY_POINTS == "rollout_dispatcher.payload_stores"
    monkeypatch.setattr(registry, "entry_points", entry_points)


def test_a_third_partys(installed: None) -> None:
    assert registry.store_class("theirs://host") is TheirStore


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("/data/rollouts", "begins with a scheme"),
        ("flie:///data", "known are broken, file"),
        ("broken://host", "install it where"),
        ("wrong://host", "is no PayloadStore"),
    ],
)
def test_what_cannot_be_opened_raises_with_a_remedy(
    installed: None, address: str, why: str
) -> None:
    with pytest.raises(StoreFailed, match=why):
        registry.open_store(address)
