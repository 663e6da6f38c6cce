"""A producer over a real socket, against a dispatcher that says what the test says."""

import gc
from collections import UserDict
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pytest

from rollout_dispatcher.errors import (
    BufferFull,
    ClientClosed,
    ConfigError,
    SampleRefused,
)
from rollout_dispatcher.protocol import messages as m
from rollout_workers import AsyncRolloutProducer, Outcome, RolloutProducer, RolloutSample
from tests.support.server import eventually
from tests.workers.support.peers import ScriptedDispatcher

FIELDS = {"input_ids": [1, 2, 3]}


def test_a_push_returns_when_it_is_answered(dispatcher: ScriptedDispatcher) -> None:
    producer, peer = dispatcher.producer()
    pushing = dispatcher.meanwhile(
        producer.push, {**FIELDS, "reward": 1.5}, group_id="g", group_size=4, policy_version=7
    )
    push = peer.expect(m.Push)
    assert (push.tokens, push.named, push.group_sizes, push.policy_versions) == (
        [3],
        False,
        [4],
        [7],
    )
    assert push.spans(peer.payload.nbytes) == [32]
    assert not pushing.done()
    peer.answer(push)
    assert pushing.result(10) is Outcome.ACCEPTED
    closing = dispatcher.meanwhile(producer.close)
    peer.expect(m.Bye)
    peer.close()
    closing.result(10)


def test_many_samples_share_a_frame_and_refusals_name_the_culprit(
    dispatcher: ScriptedDispatcher,
) -> None:
    producer, peer = dispatcher.producer()
    pushing = dispatcher.meanwhile(producer.push_many, [RolloutSample(FIELDS)] * 3)
    push = peer.expect(m.Push)
    errors = {"1": "too long", "2": "too long as well"}
    peer.answer(push, "accepted", "refused", "refused", **errors)
    with pytest.raises(SampleRefused, match=r"2 of 3 samples .* at index 1: too long"):
        pushing.result(10)
    assert len(push.tokens) == 3
    pushing = dispatcher.meanwhile(producer.push_many, [RolloutSample(FIELDS)] * 2)
    peer.answer(peer.expect(m.Push), "refused", "refused", **{"0": "too long", "1": "too long"})
    with pytest.raises(SampleRefused, match=r"2 of 2 samples were refused; the first, at index 0"):
        pushing.result(10)


def test_mappings_of_fields_are_samples_without_metadata(dispatcher: ScriptedDispatcher) -> None:
    producer, peer = dispatcher.producer()
    plain: list[Any] = [FIELDS, RolloutSample(FIELDS, policy_version=4), UserDict(FIELDS)]
    pushing = dispatcher.meanwhile(producer.push_many, plain)
    push = peer.expect(m.Push)
    assert (push.tokens, push.group_ids, push.policy_versions) == ([3] * 3, None, [None, 4, None])
    peer.answer(push)
    assert pushing.result(10) == [Outcome.ACCEPTED] * 3


@pytest.mark.parametrize(
    ("samples", "complaint"),
    [
        (
            [FIELDS, [1, 2, 3]],
            "sample 1 is no sample but list; push mappings of fields, or RolloutSample",
        ),
        ([FIELDS, None], "sample 1 is no sample but NoneType"),
        (["input_ids"], "sample 0 is no sample but str"),
        (FIELDS, "a single sample where many belong; push it with push"),
        (RolloutSample(FIELDS), r"a single sample where many belong; .* or in a list"),
        (7, "int is no list of samples"),
    ],
)
def test_what_is_no_sample_is_refused_and_nothing_is_sent(
    dispatcher: ScriptedDispatcher, samples: Any, complaint: str
) -> None:
    producer, peer = dispatcher.producer()
    with pytest.raises(SampleRefused, match=complaint):
        producer.push_many(samples)
    with pytest.raises(SampleRefused, match=complaint):
        producer.push_group(samples, "g")
    assert peer.hears_nothing()


def test_a_timeout_while_a_cap_holds_the_push_names_the_cap(dispatcher: ScriptedDispatcher) -> None:
    producer, peer = dispatcher.producer(credits=1)
    pushing = dispatcher.meanwhile(producer.push, FIELDS, timeout=0.3)
    push = peer.expect(m.Push)
    peer.send(m.Blocked(first_seq=push.first_seq, cap="tokens", held=10, capacity=12))
    with pytest.raises(BufferFull, match="tokens cap \\(10 of 12\\)") as blocked:
        pushing.result(10)
    assert "may still be accepted" in blocked.value.__notes__[0]
    (sample_id,) = blocked.value.sample_ids
    assert (push.sample_ids, push.named) == ([sample_id], True), "so a second push is a duplicate"
    assert blocked.value.__notes__[0].endswith(
        f"same sample_id only, which this error has: {sample_id}"
    )
    with pytest.raises(BufferFull, match="tokens cap") as behind:  # it waits for the same
        producer.push(FIELDS, sample_id=sample_id, timeout=0.1)
    assert "the push was withdrawn; an earlier push" in behind.value.__notes__[0]
    assert behind.value.sample_ids == (sample_id,), "the earlier push may still be accepted"
    peer.answer(push)
    assert peer.hears_nothing()


def test_a_push_that_stays_blocked_is_logged_with_the_cause(
    dispatcher: ScriptedDispatcher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("rollout_workers.producer.client.BLOCKED_LOG_S", 0.2)
    producer, peer = dispatcher.producer(credits=1)

    def is_logged(seconds: float) -> bool:
        return f"blocked for {seconds} s: the sample buffer is at its samples cap" in caplog.text

    for seconds in (0.2, 0.4):
        pushing = dispatcher.meanwhile(producer.push, FIELDS)
        push = peer.expect(m.Push)
        cause = "DP rank 0 not joined yet"
        peer.send(
            m.Blocked(first_seq=push.first_seq, cap="samples", held=8, capacity=8, waits_for=cause)
        )
        eventually(partial(is_logged, seconds), "the producer logs it")
        peer.answer(push)
        pushing.result(10)
    assert caplog.text.count("it waits for: DP rank 0 not joined yet") == 2


def test_an_end_of_the_stream_that_waits_for_a_push_given_up_says_so(
    dispatcher: ScriptedDispatcher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("rollout_workers.producer.client.CONTROL_LOG_S", 0.2)
    producer, peer = dispatcher.producer(credits=1)
    pushing = dispatcher.meanwhile(producer.push, FIELDS, timeout=0.3)
    push = peer.expect(m.Push)
    peer.send(m.Blocked(first_seq=push.first_seq, cap="tokens", held=10, capacity=12))
    with pytest.raises(BufferFull, match="tokens cap"):
        pushing.result(10)
    ending = dispatcher.meanwhile(producer.end_stream)
    told = "EndStream has waited 0.2 s for a push begun before it: the sample buffer is at its tok"
    eventually(lambda: told in caplog.text, "the producer logs it")
    peer.answer(push)
    peer.expect(m.EndStream)
    assert peer.hears_nothing()  # and answers its Ping
    ending.result(10)


def test_a_dispatcher_that_reads_slowly_is_not_taken_for_dead(
    dispatcher: ScriptedDispatcher,
) -> None:
    producer, peer = dispatcher.producer(heartbeat_interval_s=0.1, max_payload_bytes=2**30)
    pushing = dispatcher.meanwhile(producer.push, {"input_ids": np.zeros(2**22, np.int64)})
    push = peer.expect_slowly(m.Push, 2**25, seconds=1.0)
    peer.answer(push)
    assert pushing.result(10) is Outcome.ACCEPTED


def test_a_dispatcher_that_reads_nothing_is_taken_for_dead(dispatcher: ScriptedDispatcher) -> None:
    producer, _ = dispatcher.producer(heartbeat_interval_s=0.1, max_payload_bytes=2**30)
    pushing = dispatcher.meanwhile(producer.push, {"input_ids": np.zeros(2**22, np.int64)})
    again = dispatcher.accept()
    again.welcome_producer(max_payload_bytes=2**30)
    again.answer(again.expect(m.Push))
    assert pushing.result(10) is Outcome.ACCEPTED


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_push_that_may_not_wait_is_refused_before_anything_is_sent(
    timeout: float, dispatcher: ScriptedDispatcher
) -> None:
    producer, peer = dispatcher.producer()
    with pytest.raises(ConfigError, match=rf"timeout is {timeout}.* above 0, or None"):
        producer.push(FIELDS, timeout=timeout)
    pushing = dispatcher.meanwhile(producer.push, FIELDS)
    push = peer.expect(m.Push)
    assert push.first_seq == 0
    peer.answer(push)
    assert pushing.result(10) is Outcome.ACCEPTED


def test_a_silent_dispatcher_is_left_and_found_again(dispatcher: ScriptedDispatcher) -> None:
    producer, peer = dispatcher.producer(heartbeat_interval_s=0.05)
    peer.mute = True
    peer.expect_end()
    again = dispatcher.accept()
    again.welcome_producer()
    pushing = dispatcher.meanwhile(producer.push, FIELDS)
    again.answer(again.expect(m.Push))
    pushing.result(10)


def test_a_closed_producer_says_so_also_to_a_call_that_waits(
    dispatcher: ScriptedDispatcher,
) -> None:
    producer, peer = dispatcher.producer()
    pushing: Future[Outcome] = dispatcher.meanwhile(producer.push, FIELDS)
    peer.expect(m.Push)
    closing = dispatcher.meanwhile(producer.close)
    peer.expect(m.Bye)
    peer.close()
    closing.result(10)
    with pytest.raises(ClientClosed):
        pushing.result(10)
    with pytest.raises(ClientClosed):
        producer.push(FIELDS)
    producer.close()


def test_a_forgotten_producer_says_goodbye(dispatcher: ScriptedDispatcher) -> None:
    making = dispatcher.meanwhile(RolloutProducer, dispatcher.endpoint)
    peer = dispatcher.accept()
    peer.welcome()
    making.result(10)
    parting = dispatcher.meanwhile(peer.acknowledge_bye)
    del making
    gc.collect()
    parting.result(10)


def test_threads_may_share_a_producer(dispatcher: ScriptedDispatcher) -> None:
    producer, peer = dispatcher.producer(credits=3)
    pushing = [dispatcher.meanwhile(producer.push, FIELDS) for _ in range(20)]
    seen = set()
    for _ in range(20):
        push = peer.expect(m.Push)
        seen.add(push.first_seq)
        peer.answer(push)
    assert [future.result(10) for future in pushing] == [Outcome.ACCEPTED] * 20
    assert seen == set(range(20))


async def test_a_bad_argument_is_named_before_anything_is_sent() -> None:
    producer = AsyncRolloutProducer("127.0.0.1:1")
    with pytest.raises(ConfigError, match="policy_version is -1"):
        await producer.end_phase(-1)
    with pytest.raises(ConfigError, match="group_id is ''"):
        await producer.close_group("")
    with pytest.raises(ConfigError, match="'nowhere' is no address"):
        AsyncRolloutProducer("nowhere")


async def test_a_producer_that_was_not_started_says_how_to() -> None:
    with pytest.raises(ClientClosed, match="async with"):
        await AsyncRolloutProducer("127.0.0.1:1").push(FIELDS)
