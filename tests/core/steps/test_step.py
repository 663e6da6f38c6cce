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


def test_the_digest_tells_steps_ranks_and_order_apart() -> None:
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
