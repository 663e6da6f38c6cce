"""The dispatcher's requests to a client's stores, and their answers."""

import subprocess
import sys
import threading

import pytest

from rollout_dispatcher.protocol import messages as m
from rollout_workers.stores.file import FileStore
from rollout_workers.stores.registry import OpenedStores
from rollout_workers.stores.requests import DaemonExecutor, Request, perform

PATIENCE_S = 10


@pytest.fixture
def stores(store: FileStore) -> OpenedStores:
    found = OpenedStores()
    found.allow([store.address])
    return found


def test_what_stays_is_named(
    stores: OpenedStores, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileStore, "release", lambda *_: ["b", "nobody's"])
    answer = perform(stores, m.Free(number=7, store=store.address, keys=["a", "b"]))
    assert isinstance(answer, m.Freed)
    assert answer.left == ["b"]
    assert "has not released them" in answer.why


@pytest.mark.parametrize("what", ["free", "sweep"])
def test_a_store_that_fails_is_an_answer(stores: OpenedStores, what: str) -> None:
    elsewhere = "file:///" + "x" * 500
    request: Request = m.Sweep(number=1, store=elsewhere, prefix="p.")
    if what == "free":
        request = m.Free(number=1, store=elsewhere, keys=["a", "b"])
    answer = perform(stores, request)
    assert answer.why.startswith("the payload store file:///xxx")
    assert len(answer.why) == m.MAX_WHY_LETTERS
    assert answer == (
        m.Freed(number=1, left=["a", "b"], why=answer.why)
        if what == "free"
        else m.Swept(number=1, why=answer.why)
    )


def test_as_many_keys_are_sent_as_a_message_takes(
    stores: OpenedStores, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"p.1/{i}" for i in range(m.MAX_KEYS)]
    found = [*keys, "p.1/" + "x" * 600]
    monkeypatch.setattr(FileStore, "list", lambda *_: found)
    sweep = m.Sweep(number=1, store=store.address, prefix="p.1/")
    assert perform(stores, sweep) == m.Swept(number=1, keys=keys)  # no message has the longest
    found.append("p.1/y")
    assert perform(stores, sweep) == m.Swept(number=1, keys=keys, more=True)


# -- threads that run what may block, and keep no process from ending


def test_after_its_end_nothing_is_taken_and_what_was_is_done() -> None:
    executor, go = DaemonExecutor(1, "t"), threading.Event()
    futures = [executor.submit(go.wait, PATIENCE_S) for _ in range(3)]
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(print)
    go.set()
    assert all(future.result(PATIENCE_S) for future in futures)


def test_a_process_ends_whatever_hangs() -> None:
    script = (
        "import threading\n"
        "from rollout_workers.stores.requests import DaemonExecutor\n"
        "begun = threading.Event()\n"
        "DaemonExecutor(1, 't').submit(lambda: (begun.set(), threading.Event().wait()))\n"
        "begun.wait()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE_S * 3)
