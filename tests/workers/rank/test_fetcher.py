"""A DP rank with a real store and a scripted dispatcher: fetched, then prepared, then trained."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from rollout_dispatcher.errors import ProtocolError, StoreFailed
from rollout_dispatcher.payload import Reference
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import Sample
from rollout_workers.rank.client import RankClient
from rollout_workers.rank.payload import arrays
from rollout_workers.stores.file import FileStore
from rollout_workers.stores.interface import Missing, Part, PayloadStore
from tests.workers.support.peers import (
    PATIENCE_S,
    Peer,
    ScriptedDispatcher,
    micro_batch,
    sample,
    step,
)
from tests.workers.support.stored import frees_before_it_leaves, put

ONE, TWO = sample([1, 2, 3], name="one"), sample([4, 5], name="two")


Joined = tuple[RankClient, Peer]


@pytest.fixture
def joined(dispatcher: ScriptedDispatcher, store: FileStore) -> Joined:
    return dispatcher.rank(payload_stores=[store.address])


def send(peer: Peer, number: int, *samples: Sample) -> None:
    peer.send(step(number).model_copy(update={"num_referenced": 1}))
    peer.send_bytes(micro_batch(number, 0, *samples))


def test_a_step_is_prepared_when_its_samples_are_fetched_and_trained_as_ever(
    joined: Joined, store: FileStore
) -> None:
    client, peer = joined
    send(peer, 0, *put(store, "p.1/0", ONE), TWO)
    assert peer.wait_for(m.Prepared).step == 0
    store.release(["p.1/0"])  # it has what it needs
    peer.send(m.Release(step=0))
    held = client.next_step(PATIENCE_S)
    assert held is not None
    got = held.micro_batch(0)
    assert arrays(got.payload, got.blocks)["input_ids"].tolist() == [1, 2, 3, 4, 5]
    assert arrays(got.payload, got.blocks)["reward"].tolist() == [6, 9]


class Away(FileStore):
    """A store that cannot be asked at first."""

    failures = 2

    def get_into(
        self,
        references: Sequence[Reference],
        memory: memoryview,
        parts: Sequence[Sequence[Part]],
    ) -> list[Missing | None]:
        """Fail, then get."""
        Away.failures -= 1
        if Away.failures >= 0:
            raise StoreFailed(self.address, "nobody answers")
        return super().get_into(references, memory, parts)


def test_a_store_that_cannot_be_asked_is_asked_again_and_the_log_says_so_once(
    joined: Joined,
    store: FileStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("rollout_workers.stores.file.FileStore", Away)
    _, peer = joined
    send(peer, 0, *put(store, "p.1/0", ONE))
    assert peer.wait_for(m.Prepared).step == 0
    assert caplog.text.count("step 0: cannot fetch samples") == 1
    assert "nobody answers" in caplog.text


class Wrong(FileStore):
    """A store that returns less than was asked for."""

    get_into = PayloadStore.get_into

    def get(self, references: Sequence[Reference]) -> list[memoryview | Missing]:
        """Eight bytes too few of each."""
        return [memoryview(bytes(reference.nbytes - 8)) for reference in references]


def test_a_store_that_returns_something_else_ends_the_stream_with_an_error(
    joined: Joined, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_workers.stores.file.FileStore", Wrong)
    client, peer = joined
    send(peer, 0, *put(store, "p.1/0", ONE))
    with pytest.raises(ProtocolError, match=r"Wrong returned \d+ bytes of p.1/0"):
        client.next_step(PATIENCE_S)


def test_a_store_that_is_not_allowed_is_not_opened(
    joined: Joined, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "other").mkdir()
    other = FileStore.open(f"file://{tmp_path / 'other'}")
    client, peer = joined
    send(peer, 0, *put(other, "p.1/0", ONE))
    with pytest.raises(TimeoutError):
        client.next_step(0.2)
    assert "the dispatcher does not allow it" in caplog.text


def test_who_has_said_goodbye_frees_what_nobody_else_is_there_to_free(
    joined: Joined, dispatcher: ScriptedDispatcher, store: FileStore
) -> None:
    client, peer = joined
    frees_before_it_leaves(peer, dispatcher.meanwhile(client.close), store)


def test_a_loop_that_asks_now_and_then_gets_what_does_not_fit_ahead(
    dispatcher: ScriptedDispatcher, store: FileStore
) -> None:
    client, peer = dispatcher.rank(payload_stores=[store.address], prefetch_bytes=1)
    send(peer, 0, *put(store, "p.1/0", ONE))
    assert peer.hears_nothing()
    with pytest.raises(TimeoutError):
        client.next_step(0.0)
    assert peer.wait_for(m.Prepared).step == 0
    peer.send(m.Release(step=0))
    held = client.next_step(PATIENCE_S)
    assert held is not None
    held.commit()
    send(peer, 1, *put(store, "p.1/1", TWO))
    peer.wait_for_commit()
    assert peer.hears_nothing()


def test_a_stream_closes_at_once_while_a_store_is_away(
    joined: Joined, dispatcher: ScriptedDispatcher, store: FileStore
) -> None:
    client, peer = joined
    placed = put(store, "p.1/0", ONE)
    store.root.rename(store.root.with_name("away"))
    send(peer, 0, *placed)
    closing = dispatcher.meanwhile(client.close)
    peer.acknowledge_bye()
    closing.result(PATIENCE_S)
