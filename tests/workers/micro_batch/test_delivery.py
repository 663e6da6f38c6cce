"""Micro-batches on their way to where they are computed, the next one ahead of the loop."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import StepContractError
from rollout_dispatcher.protocol import messages as m
from rollout_workers.micro_batch.collate import CollateConfig
from rollout_workers.micro_batch.delivery import Coming, Delivery, delivery_to, look_ahead
from rollout_workers.micro_batch.layouts import Collation
from rollout_workers.micro_batch.loss import LossConfig
from rollout_workers.micro_batch.micro_batch import MicroBatch
from rollout_workers.step import Step
from tests.workers.micro_batch.batches import TWO, batch
from tests.workers.support.peers import ScriptedDispatcher, micro_batch, sample, step

gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="there is no GPU here: copies ahead, on a stream of their own, are not tested",
)


class Ahead(Delivery):
    """Notes what is sent and what is used, in order."""

    ahead = True

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def send(self, batch: MicroBatch) -> Coming:
        self.events.append(f"send {batch.index}")
        return super().send(batch)


class Numbers:
    """Sends numbers, and notes which."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(self, index: int) -> int:
        self.numbers.append(index)
        return index


@given(st.lists(st.booleans(), max_size=8))
def test_each_is_sent_once_and_in_order_and_what_is_not_here_is_not_waited_for(
    here: list[bool],
) -> None:
    sent = Numbers()
    for index in look_ahead(len(here), here.__getitem__, sent):
        following = index + 1 < len(here) and here[index + 1]
        assert sent.numbers == list(range(index + 1 + following))
    assert sent.numbers == list(range(len(here)))


def test_a_step_looks_ahead_at_what_has_come_and_no_further(dispatcher: ScriptedDispatcher) -> None:
    client, peer = dispatcher.rank()
    peer.send(step(0, 3, tokens=3, loss_tokens=3, num_samples=3))
    for index in range(2):
        peer.send_bytes(micro_batch(0, index, sample([index])))
    peer.send(m.Release(step=0))
    taken = client.next_step(10)
    assert taken is not None
    assert (taken.has(1), taken.has(2)) == (True, False)
    delivery = Ahead()
    config = CollateConfig(LossConfig(1), delivery=delivery)
    loop = Step(taken, config, epochs=2)
    batches = iter(loop)
    assert next(batches).input_ids.tolist() == [0]
    assert delivery.events == ["send 0", "send 1"]
    with pytest.raises(StepContractError, match="1 of its 3 micro-batches were handed out"):
        loop.commit()  # what was sent ahead was not handed out
    assert next(batches).input_ids.tolist() == [1]
    peer.send_bytes(micro_batch(0, 2, sample([2])))
    assert next(batches).input_ids.tolist() == [2]
    assert [each.index for each in loop] == [0, 1, 2]
    assert delivery.events == [f"send {index}" for index in (0, 1, 2, 0, 1, 2)]
    with pytest.raises(StepContractError, match="epochs=2"):
        next(iter(loop))
    loop.commit()


def test_micro_batches_go_to_the_device_of_the_stream() -> None:
    assert not delivery_to(None).copies
    assert not delivery_to(torch.device("cpu")).copies
    there = delivery_to(torch.device("meta"))
    assert there.copies
    assert not there.ahead
    assert there.send(batch(*TWO))().input_ids.is_meta


@gpu
@pytest.mark.parametrize("layout", list(Collation))
def test_a_gpu_gets_what_the_host_had(layout: Collation) -> None:
    config = CollateConfig(LossConfig(2), layout, sample_length_multiple=4)
    expected = batch(*TWO, config=config)
    found = delivery_to(torch.device("cuda")).send(batch(*TWO, config=config))()
    assert found.layout is layout
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.is_cuda, name
        pair = (tensor.values(), expected[name].values()) if tensor.is_nested else None
        one, other = pair or (tensor, expected[name])
        assert torch.equal(one.cpu(), other), name


@gpu
def test_a_gpu_is_given_no_memory_that_is_still_read_or_copied() -> None:
    """Every micro-batch is let go of while the GPU has not come to it yet."""
    delivery, rows = delivery_to(torch.device("cuda")), 1 << 20
    busy = torch.randn(4096, 4096, device="cuda")
    sums = []
    one = batch(*TWO)
    for index in range(64):
        there = delivery.send(replace(one, tensors={"input_ids": torch.full((rows,), index)}))()
        for _ in range(8):
            busy = torch.tanh(busy @ busy)
        sums.append(there.input_ids.sum())
        del there
    assert torch.stack(sums).tolist() == [index * rows for index in range(64)]
