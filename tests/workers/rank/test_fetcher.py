"""A DP rank with a real store and a scripted dispatcher: fetched, then prepared, then trained."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollout_dispatcher.errors import ProtocolError, StoreFailed
from rollout_dispatcher.payload import Reference
from rollout_dispatcher.protocol import assemble
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


@pytest.fixture
def joined(
    dispatcher: ScriptedDispatcher, threads: ThreadPoolExecutor, store: FileStore
) -> Iterator[tuple[RankClient, Peer]]:
    joining = threads.submit(RankClient, dispatcher.endpoint, dp_rank=0, dp_size=2)
    peer = dispatcher.accept()
    peer.welcome_rank(payload_stores=[store.address])
    client = joining.result(PATIENCE_S)
    yield client, peer
    dispatcher.hang_up()
    client.close()


def send(peer: Peer, number: int, *samples: Sample) -> None:
    peer.send(step(number).model_copy(update={"num_referenced": 1}))
    peer.send_bytes(micro_batch(number, 0, *samples))


def test_a_step_is_prepared_when_its_samples_are_fetched_and_trained_as_ever(
    joined: tuple[RankClient, Peer], store: FileStore
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


def test_what_is_gone_is_told_and_the_next_attempt_is_prepared(
    joined: tuple[RankClient, Peer], store: FileStore
) -> None:
    client, peer = joined
    placed = put(store, "p.1/0", ONE)
    store.release(["p.1/0"])
    send(peer, 0, *placed, TWO)
    said = peer.wait_for(m.Unresolved)
    assert (said.step, said.attempt, said.sample_ids) == (0, 0, ["one"])
    assert "p.1/0" in said.why
    again = {"attempt": 1, "digest": "e", "num_referenced": 1}
    peer.send(step(0).model_copy(update=again))
    peer.send_bytes(b"".join(assemble.micro_batch(0, 0, [TWO], attempt=1)))
    assert peer.wait_for(m.Prepared) == m.Prepared(step=0, digest="e", attempt=1)
    peer.send(m.Release(step=0))
    held = client.next_step(PATIENCE_S)
    assert held is not None
    assert held.micro_batch(0).header.sample_ids == ["two"]


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
    joined: tuple[RankClient, Peer],
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
    joined: tuple[RankClient, Peer], store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_workers.stores.file.FileStore", Wrong)
    client, peer = joined
    send(peer, 0, *put(store, "p.1/0", ONE))
    with pytest.raises(ProtocolError, match=r"Wrong returned \d+ bytes of p.1/0"):
        client.next_step(PATIENCE_S)


def test_a_store_that_is_not_allowed_is_not_opened(
    joined: tuple[RankClient, Peer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "other").mkdir()
    other = FileStore.open(f"file://{tmp_path / 'other'}")
    client, peer = joined
    send(peer, 0, *put(other, "p.1/0", ONE))
    with pytest.raises(TimeoutError):
        client.next_step(0.2)
    assert "the dispatcher does not allow it" in caplog.text


def test_who_has_said_goodbye_frees_what_nobody_else_is_there_to_free(
    joined: tuple[RankClient, Peer], threads: ThreadPoolExecutor, store: FileStore
) -> None:
    client, peer = joined
    frees_before_it_leaves(peer, threads.submit(client.close), store)


def test_a_loop_that_asks_now_and_then_gets_what_does_not_fit_ahead(
    dispatcher: ScriptedDispatcher, threads: ThreadPoolExecutor, store: FileStore
) -> None:
    joining = threads.submit(RankClient, dispatcher.endpoint, dp_rank=0, dp_size=2)
    peer = dispatcher.accept()
    peer.welcome_rank(payload_stores=[store.address], prefetch_bytes=1)
    client = joining.result(PATIENCE_S)
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
    dispatcher.hang_up()
    client.close()


def test_a_stream_closes_at_once_while_a_store_is_away(
    dispatcher: ScriptedDispatcher, threads: ThreadPoolExecutor, store: FileStore
) -> None:
    joining = threads.submit(RankClient, dispatcher.endpoint, dp_rank=0, dp_size=2)
    peer = dispatcher.accept()
    peer.welcome_rank(payload_stores=[store.address])
    client = joining.result(PATIENCE_S)
    placed = put(store, "p.1/0", ONE)
    store.root.rename(store.root.with_name("away"))
    send(peer, 0, *placed)
    closing = threads.submit(client.close)
    peer.acknowledge_bye()
    closing.result(PATIENCE_S)
