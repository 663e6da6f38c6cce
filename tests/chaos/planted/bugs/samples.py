"""Bugs in what becomes of samples until they are in a step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rollout_dispatcher.core.admission.admission import Admission
from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.steps.step import MicroBatches, OpenStep, OpenSteps
from rollout_dispatcher.sample import Sample
from tests.chaos.planted.plant import plant, planted

#: The step that holds the samples of the one before it, in `repeat_a_step`.
REPEATED = 5
#: The sample that is passed over in `starve_a_sample`, and until how many have come.
STARVED, FED_AFTER = 30, 600


@planted
def ignore_caps() -> None:
    """P7: whatever is pushed comes in."""
    plant(SampleBuffer, "soft_cap", lambda *_: None)
    plant(SampleBuffer, "hard_cap", lambda *_: None)


@planted
def hold_for_ever() -> None:
    """P8, Blocked: a push that was held back once is not let in when there is room."""
    plant(Admission, "retry", lambda *_: [])


@planted
def starve_a_sample() -> None:
    """P4: one sample is passed over again and again."""
    ready = SampleBuffer.ready

    def without(
        buffer: SampleBuffer, limit: int, keep: Callable[[Entry], bool] | None = None
    ) -> list[Entry]:
        def kept(entry: Entry) -> bool:
            hidden = entry.ticket == STARVED and buffer.next_ticket < FED_AFTER
            return not hidden and (keep is None or keep(entry))

        return ready(buffer, limit, kept)

    plant(SampleBuffer, "ready", without)


@planted
def repeat_a_step() -> None:
    """P3: a step is delivered as a new one once more, in the place of other samples.

    The journal is told of the right ones, or it would find the contradiction.
    """
    add = OpenSteps.add
    before: list[MicroBatches] = []
    right: dict[int, MicroBatches] = {}

    def again(
        steps: OpenSteps, micro_batches: MicroBatches, *others: Any, **named: Any
    ) -> OpenStep:
        if steps.next_number == REPEATED:
            right[REPEATED], micro_batches = micro_batches, before[-1]
        before.append(micro_batches)
        return add(steps, micro_batches, *others, **named)

    def newest(steps: OpenSteps) -> OpenStep:
        step = steps.uncommitted()[-1]
        return replace(step, micro_batches=right.get(step.number, step.micro_batches))

    plant(OpenSteps, "add", again)
    OpenSteps.last_planned = property(newest)  # type: ignore[method-assign, assignment]


@planted
def miscount_loss_tokens() -> None:
    """P5, Step: its header tells other loss totals than its samples have."""
    samples_of = OpenStep.samples

    def counting_one_twice(step: OpenStep) -> list[Sample]:
        samples = samples_of(step)
        return [samples[0]._replace(loss_tokens=samples[0].loss_tokens + 1), *samples[1:]]

    plant(OpenStep, "samples", counting_one_twice)
