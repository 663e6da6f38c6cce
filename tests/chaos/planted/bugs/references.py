"""Bugs in what becomes of payloads by reference."""

from dataclasses import replace
from typing import Any

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.buffer.objects import NeededObjects, OrphanCollector
from rollout_dispatcher.core.references import References
from rollout_dispatcher.core.steps import ledger as attempts
from rollout_dispatcher.core.steps.step import MicroBatches, OpenStep, OpenSteps
from tests.chaos.planted.plant import plant, planted


@planted
def release_when_planned() -> None:
    """P1, Free: objects are released when their samples are planned, and not when committed."""
    add, done, take = OpenSteps.add, NeededObjects.done, References.pop_unneeded
    in_steps: list[Entry] = []

    def noting(steps: OpenSteps, micro_batches: MicroBatches, *rest: Any, **named: Any) -> OpenStep:
        in_steps.extend(entry for rank in micro_batches for part in rank for entry in part)
        return add(steps, micro_batches, *rest, **named)

    def early(references: References) -> None:
        done(references.objects, in_steps)
        in_steps.clear()
        take(references)

    plant(OpenSteps, "add", noting)
    plant(References, "pop_unneeded", early)
    plant(NeededObjects, "done", lambda *_: None)


@planted
def ignore_unresolved() -> None:
    """P8, Unresolved: nobody hears that samples are gone."""
    plant(attempts.Attempts, "unresolved", lambda *_: [])


@planted
def keep_the_attempt() -> None:
    """P2, Unresolved: what is left of a step is planned again under the attempt that is void."""
    fill = OpenSteps._replace_samples

    def same(steps: OpenSteps, step: OpenStep, micro_batches: MicroBatches) -> OpenStep:
        return fill(steps, replace(step, attempt=step.attempt - 1), micro_batches)

    plant(OpenSteps, "_replace_samples", same)


@planted
def split_a_group() -> None:
    """Groups are whole, Unresolved: what is gone is dropped, and the rest of its group trained."""

    def named(step: OpenStep, sample_ids: tuple[str, ...]) -> list[Entry]:
        return [entry for entry in step.entries() if entry.sample.sample_id in sample_ids]

    plant(attempts, "_with_groups", named)


@planted
def forget_what_was_put() -> None:
    """P7, Sweep: what a producer put and never pushed is looked for by nobody."""
    plant(OrphanCollector, "begins", lambda *_: False)
