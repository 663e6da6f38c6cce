"""A producer chooses shared memory by itself, and goes on without wherever that cannot be."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rollout_dispatcher.errors import SegmentRefused
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.versions import OF_PRODUCERS, SHARED_MEMORY
from rollout_workers import Outcome, RolloutProducer
from rollout_workers.client.sharing import SEGMENT_FROM_BYTES
from rollout_workers.producer.layout import ArrayLike
from tests.support.descriptors import no_more_descriptors
from tests.workers.support.peers import Peer, ScriptedDispatcher

BOTH_CAN = sorted(OF_PRODUCERS | {SHARED_MEMORY})


def large(tokens: int = SEGMENT_FROM_BYTES // 8) -> dict[str, ArrayLike]:
    return {"input_ids": np.arange(tokens)}


def connect(
    dispatcher: ScriptedDispatcher, threads: ThreadPoolExecutor, capabilities: Sequence[str] = ()
) -> tuple[RolloutProducer, Peer, m.HelloProducer]:
    future = threads.submit(RolloutProducer, dispatcher.endpoint)
    peer = dispatcher.accept()
    hello = peer.welcome_producer(capabilities=[*capabilities])
    return future.result(), peer, hello


def test_what_is_large_goes_as_a_segment_and_what_is_small_as_bytes(
    dispatcher: ScriptedDispatcher, threads: ThreadPoolExecutor
) -> None:
    producer, peer, hello = connect(dispatcher, threads, capabilities=BOTH_CAN)
    assert SHARED_MEMORY in hello.capabilities
    for tokens, segment in ((SEGMENT_FROM_BYTES // 8, SEGMENT_FROM_BYTES), (10, None)):
        future = threads.submit(producer.push, large(tokens))
        push = peer.expect(m.Push)
        assert push.segment == segment
        assert len(peer.payload) == (0 if segment else 8 * tokens)
        peer.answer(push)
        assert future.result() is Outcome.ACCEPTED
    threads.submit(producer.close)
    peer.take_leave()


def test_a_dispatcher_that_cannot_is_sent_bytes(
    dispatcher: ScriptedDispatcher, threads: ThreadPoolExecutor
) -> None:
    producer, peer, _ = connect(dispatcher, threads)
    future = threads.submit(producer.push, large())
    push = peer.expect(m.Push)
    assert (push.segment, len(peer.payload)) == (None, SEGMENT_FROM_BYTES)
    peer.answer(push)
    future.result()
    threads.submit(producer.close)
    peer.take_leave()


def test_a_push_whose_answer_was_lost_goes_as_a_new_segment(
    dispatcher: ScriptedDispatcher, threads: ThreadPoolExecutor
) -> None:
    producer, peer, _ = connect(dispatcher, threads, capabilities=BOTH_CAN)
    future = threads.submit(producer.push, large())
    lost = peer.expect(m.Push)
    peer.close()
    peer = dispatcher.accept()
    assert SHARED_MEMORY in peer.welcome_producer(capabilities=BOTH_CAN).capabilities
    again = peer.expect(m.Push)
    assert (again.segment, again.first_seq) == (SEGMENT_FROM_BYTES, lost.first_seq)
    peer.answer(again)
    assert future.result() is Outcome.ACCEPTED
    threads.submit(producer.close)
    peer.take_leave()


def test_after_a_refused_segment_bytes_are_sent(
    dispatcher: ScriptedDispatcher,
    threads: ThreadPoolExecutor,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    producer, peer, _ = connect(dispatcher, threads, capabilities=BOTH_CAN)
    future = threads.submit(producer.push, large())
    peer.expect(m.Push)
    refused = SegmentRefused("why")
    peer.send(m.Error(code=refused.code, message=str(refused), retriable=refused.retriable))
    peer.close()
    peer = dispatcher.accept()
    assert SHARED_MEMORY not in peer.welcome_producer().capabilities
    push = peer.expect(m.Push)
    assert (push.segment, len(peer.payload)) == (None, SEGMENT_FROM_BYTES)
    peer.answer(push)
    assert future.result() is Outcome.ACCEPTED
    threads.submit(producer.close)
    peer.take_leave()
    assert "shared memory is not used any more" in caplog.text


def test_for_want_of_descriptors_bytes_are_sent_and_segments_again_later(
    dispatcher: ScriptedDispatcher,
    threads: ThreadPoolExecutor,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    producer, peer, _ = connect(dispatcher, threads, capabilities=BOTH_CAN)
    with no_more_descriptors():
        for _ in range(2):
            future = threads.submit(producer.push, large())
            push = peer.expect(m.Push)
            assert (push.segment, len(peer.payload)) == (None, SEGMENT_FROM_BYTES)
            peer.answer(push)
            assert future.result() is Outcome.ACCEPTED
    future = threads.submit(producer.push, large())
    push = peer.expect(m.Push)
    assert push.segment == SEGMENT_FROM_BYTES
    peer.answer(push)
    future.result()
    threads.submit(producer.close)
    peer.take_leave()
    assert caplog.text.count("no shared memory") == 1
