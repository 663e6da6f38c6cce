"""What a DP rank holds: every arrival in its place, every commit in its turn."""

import pytest

from rollout_dispatcher.errors import ProtocolError, StepContractError
from rollout_dispatcher.protocol import assemble
from rollout_dispatcher.protocol import messages as m
from rollout_workers.rank.held_steps import HeldState, HeldSteps
from tests.workers.support.peers import arrived, micro_batch, sample, step


def holding(*numbers: int, count: int = 1) -> HeldSteps:
    """Steps of so many micro-batches, announced and not released."""
    steps = HeldSteps()
    for number in numbers:
        assert steps.on_header(step(number, count))
    return steps


def deliver(steps: HeldSteps, number: int, index: int) -> None:
    header, payload = arrived(micro_batch(number, index, sample([1])))
    assert isinstance(header, m.MicroBatch)
    steps.receive(header, payload)


def take(steps: HeldSteps) -> int:
    held = steps.next_untaken()
    assert held is not None
    held.state = HeldState.TAKEN
    return held.header.step


def test_a_step_that_comes_again_and_differs_is_an_error() -> None:
    steps = HeldSteps()
    assert steps.on_header(step(0, digest="one"))
    assert steps.on_header(step(0, digest="one"))
    with pytest.raises(ProtocolError, match="step 0 came twice and differs: digest one, then two"):
        steps.on_header(step(0, digest="two"))


@pytest.mark.parametrize("groups", [None, [], [4, 4]])
def test_a_group_that_the_step_does_not_have_is_an_error(groups: list[int] | None) -> None:
    steps = HeldSteps()
    steps.on_header(step(0).model_copy(update={"group_loss_tokens": groups}))
    header, payload = arrived(assemble.micro_batch(0, 0, [sample([1])], [2]))
    assert isinstance(header, m.MicroBatch)
    with pytest.raises(ProtocolError, match=f"samples of group 2, of {len(groups or ())}"):
        steps.receive(header, payload)
    assert steps.received() == [(0, 0)]


def test_micro_batches_come_in_order_and_no_more_than_announced() -> None:
    steps = holding(0)
    with pytest.raises(ProtocolError, match="micro-batch 1 of step 0, which has 1"):
        deliver(steps, 0, 1)
    deliver(steps, 0, 0)
    with pytest.raises(ProtocolError, match="micro-batch of step 5, which was not announced"):
        deliver(steps, 5, 0)
    assert steps.received() == [(0, 1)]


def test_committing_out_of_order_names_the_step_that_is_due() -> None:
    steps = holding(0, 1)
    with pytest.raises(StepContractError, match="step 0 may not be committed now; none is open"):
        steps.commit(0)
    assert [take(steps), take(steps)] == [0, 1]
    with pytest.raises(StepContractError, match=r"step 1 may not .* step 0 is the next"):
        steps.commit(1)
    steps.commit(0)
    with pytest.raises(StepContractError, match="step 0 is committed already; step 1 is the next"):
        steps.commit(0)
    steps.commit(1)
    assert steps.committed == 1


def test_a_committed_step_is_gone_and_what_comes_of_it_is_ignored() -> None:
    steps = holding(0)
    take(steps)
    steps.commit(0)
    with pytest.raises(StepContractError, match="step 0 is committed"):
        steps.find(0)
    assert not steps.on_header(step(0))
    deliver(steps, 0, 0)
    steps.release(0)
    assert len(steps) == 0
