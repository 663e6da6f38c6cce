"""What a producer puts, and what it says of it: put first, then pushed, and never twice."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rollout_dispatcher.payload import StoredObject
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_dispatcher.sample import Outcome
from rollout_workers.producer.core import ProducerCore, Settled
from rollout_workers.producer.encode import EncodedSample, Encoder, RolloutSample
from rollout_workers.producer.pushes import Put
from tests.workers.producer import cores
from tests.workers.producer.cores import connect, hear
from tests.workers.producer.cores import pushed as answered

STORE = "file:///data"
#: Tokens of a sample that is put, as its span has 8 bytes a token; of others it is not.
LARGE, SMALL = 8, 2
WELCOME: dict[str, Any] = {"credits": 4, "payload_stores": [STORE], "inline_limit": 8 * LARGE}


def connected(max_payload_bytes: int = 1 << 20) -> ProducerCore:
    return cores.connected(max_payload_bytes=max_payload_bytes, **WELCOME)


def encoded(*tokens: int) -> list[EncodedSample]:
    """Samples of so many tokens; each token of a sample is its place in the list."""
    fields = (RolloutSample({"input_ids": np.full(n, at)}) for at, n in enumerate(tokens))
    return Encoder().encode(fields)


def ids(buffers: Sequence[Buffer]) -> list[int]:
    return list(map(int, np.frombuffer(b"".join(buffers), np.int64)))


def stored(put: Put) -> StoredObject:
    return StoredObject(STORE, put.key, sum(map(len, put.spans)))


def said(core: ProducerCore) -> list[tuple[m.Message, list[int]]]:
    return [(message, ids(payload)) for message, payload in core.take_messages(0.0)]


def pushed(core: ProducerCore) -> list[m.Push]:
    return [message for message, _ in said(core) if isinstance(message, m.Push)]


def test_large_samples_of_a_push_are_put_into_one_object_before_it_goes_out() -> None:
    core = connected()
    core.submit(encoded(LARGE, SMALL, LARGE + 1))
    assert said(core) == []
    (put,) = core.objects.pop_puts()
    assert ids(put.spans) == [0] * LARGE + [2] * (LARGE + 1)
    core.was_put(put, stored(put))
    ((push, payload),) = said(core)
    assert isinstance(push, m.Push)
    assert push.objects == [m.ObjectHeader(store=STORE, key=put.key, nbytes=8 * (2 * LARGE + 1))]
    assert push.places == [(0, 0), None, (0, 8 * LARGE)]
    assert payload == [1] * SMALL
    assert push.spans(8 * SMALL) == [0, 8 * SMALL, 0]
    m.Push.model_validate(push.model_dump())  # as what was changed is not checked again


def test_keys_begin_with_the_process_and_are_never_used_twice() -> None:
    cores = [connected(), connected()]
    for core in cores:
        core.submit(encoded(LARGE, LARGE))
        core.submit(encoded(LARGE))
    keys = [put.key for core in cores for put in core.objects.pop_puts()]
    assert [key.partition("/")[2] for key in keys] == ["0", "2", "0", "2"]
    incarnations = {key.partition("/")[0] for key in keys}
    assert len(incarnations) == 2
    assert all(name.startswith("me.") for name in incarnations)


def test_others_go_out_meanwhile_and_controls_wait() -> None:
    core = connected()
    core.submit(encoded(LARGE))
    core.control(m.EndStream())
    core.submit(encoded(SMALL))
    (push,) = pushed(core)
    assert (push.first_seq, push.floor) == (1, 0)
    assert hear(core, answered(1, "accepted")) == [Settled(1, (Outcome.ACCEPTED,))]
    assert said(core) == []
    (put,) = core.objects.pop_puts()
    core.was_put(put, stored(put))
    assert [push.first_seq for push in pushed(core)] == [0]
    hear(core, answered(0, "accepted"))
    assert [type(message) for message, _ in said(core)] == [m.EndStream, m.Ping]


def test_after_a_loss_the_same_push_is_said_and_nothing_is_put_again() -> None:
    core = connected()
    core.submit(encoded(LARGE, SMALL))
    (put,) = core.objects.pop_puts()
    core.lost()  # while it is being put
    connect(core, **WELCOME)
    assert said(core) == []
    core.was_put(put, stored(put))
    first = said(core)
    core.lost()
    connect(core, **WELCOME)
    assert said(core) == first
    assert core.objects.pop_puts() == []
    assert hear(core, answered(0, "accepted")) == [Settled(0, (Outcome.ACCEPTED,) * 2)]


def test_what_no_store_takes_and_no_frame_is_refused() -> None:
    core = connected(max_payload_bytes=8 * SMALL)
    core.submit(encoded(LARGE, SMALL))
    (put,) = core.objects.pop_puts()
    core.was_not_put(put, "no room")
    assert said(core) == []
    (settled,) = core.take_settled()
    refused = settled.outcomes
    assert len(refused) == 2
    assert "exceed the dispatcher's frame limit of 16 bytes, and no room" in str(refused[0])


def test_a_push_that_is_withdrawn_before_it_was_sent_takes_its_object_along() -> None:
    core = connected()
    core.submit(encoded(LARGE))
    core.submit(encoded(LARGE))
    first, second = core.objects.pop_puts()
    assert core.abandon(0, 0.0) == (True, None)
    core.was_put(first, stored(first))
    core.was_put(second, stored(second))
    assert core.abandon(1, 0.0) == (True, None)
    assert core.objects.pop_orphans() == [stored(first), stored(second)]
    assert said(core) == []
    core.was_not_put(first, "late")  # and nothing happens


@pytest.mark.parametrize(
    ("outcomes", "ours"),
    [(["full", "full"], True), (["refused", "full"], True), (["accepted", "full"], False)],
)
def test_an_object_of_which_a_sample_was_taken_is_the_dispatchers(
    outcomes: list[str], ours: bool
) -> None:
    core = connected()
    core.submit(encoded(LARGE, LARGE))
    (put,) = core.objects.pop_puts()
    core.was_put(put, stored(put))
    pushed(core)
    hear(core, answered(0, *outcomes))
    core.abandon(0, 0.0)
    assert core.objects.pop_orphans() == ([stored(put)] if ours else [])


def test_a_push_that_may_have_arrived_keeps_its_object() -> None:
    core = connected()
    core.submit(encoded(LARGE))
    (put,) = core.objects.pop_puts()
    core.was_put(put, stored(put))
    pushed(core)
    assert core.abandon(0, 0.0) == (False, None)
    assert core.objects.pop_orphans() == []
    core.lost()
    connect(core, **WELCOME)
    assert len(pushed(core)) == 1
