"""A step by itself: what may become of it, and its digest."""

import pytest

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.steps.step import NEXT, OpenStep, StepEvent, StepState, step_digest
from rollout_dispatcher.errors import IllegalTransition
from tests.support.samples import make_sample


def test_every_state_and_event_has_its_move_or_none() -> None:
    for state in StepState:
        for event in StepEvent:
            step = OpenStep(0, (), "d", 0.0, state)
            if (state, event) in NEXT:
                step.move(event)
                assert step.state is NEXT[state, event]
            else:
                with pytest.raises(IllegalTransition):
                    step.move(event)
                assert step.state is state


def test_the_digest_differs_by_step_rank_and_order() -> None:
    a, b = (Entry(make_sample(name), ticket, 0.0) for ticket, name in enumerate("ab"))
    plans = [
        (0, (((a,),), ((b,),))),
        (1, (((a,),), ((b,),))),
        (0, (((b,),), ((a,),))),
        (0, (((a, b),), ((),))),
        (0, (((a,), (b,)), ((), ()))),
    ]
    digests = [step_digest(number, micro_batches) for number, micro_batches in plans]
    assert len(set(digests)) == len(plans)
    assert digests[0] == step_digest(*plans[0])
    assert step_digest(*plans[3], cp_sizes=((2,), (2,))) not in digests


def test_a_step_without_blocks_has_the_digest_of_releases_that_knew_none() -> None:
    a, b = (Entry(make_sample(name), ticket, 0.0) for ticket, name in enumerate("ab"))
    digest = step_digest(3, (((a,),), ((b,),)), 1, 2.5)
    assert digest == "5691e0eedd70c9bd76cdbdb90192f44e"


def test_the_samples_of_a_block_count_on_its_first_rank_and_are_trained_by_all() -> None:
    a, b = (Entry(make_sample(name), ticket, 0.0) for ticket, name in enumerate("ab"))
    step = OpenStep(
        0, (((a,),), ((),), ((b,),), ((),)), "d", 0.0, cp_sizes=((2,), (2,), (1,), (1,))
    )
    assert step.num_samples == 2
    assert [step.trained_by(dp_rank, 0) for dp_rank in range(4)] == [(a,), (a,), (b,), ()]
    assert [step.block(dp_rank, 0) for dp_rank in range(4)] == [(2, 0), (2, 1), (1, 0), (1, 0)]
