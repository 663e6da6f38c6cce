"""Bugs in what a new process group is given, and who belongs to it."""

from typing import Any

from rollout_dispatcher.core.effects import Effect
from rollout_dispatcher.core.steps.checkpoints import Checkpoints
from rollout_dispatcher.core.steps.generation import Generation
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.core.steps.step import MicroBatches, OpenStep, OpenSteps
from tests.chaos.planted.plant import plant, planted


@planted
def skip_fencing() -> None:
    """P2, HelloRank: an older generation is neither told that it is over nor refused."""
    begin = Generation.begin

    def quiet(generation: Generation, hello: RankHello) -> list[Effect]:
        begin(generation, hello)
        return []

    plant(Generation, "_check_number", lambda *_: None)
    plant(Generation, "begin", quiet)


@planted
def believe_a_stranger() -> None:
    """P6, HelloRank: who claims the place of a rank that is there gets it."""
    plant(Generation, "_check_member", lambda *_: None)


@planted
def drop_a_redelivery() -> None:
    """P1: a new generation is not given the oldest open step again."""
    start_over = OpenSteps.start_over

    def forgetful(steps: OpenSteps) -> None:
        start_over(steps)
        if steps:
            steps.commit(min(steps))

    plant(OpenSteps, "start_over", forgetful)


@planted
def change_a_redelivery() -> None:
    """P2: a new generation is given open steps with its ranks' shares exchanged."""
    start_over = OpenSteps.start_over

    def changing(steps: OpenSteps) -> None:
        start_over(steps)
        for number, step in list(steps.items()):
            steps.replace(number, step.micro_batches[::-1], step.dp_size)

    plant(OpenSteps, "start_over", changing)


@planted
def lose_a_sample_for_another_size() -> None:
    """P1: an open step that is planned again for another number of ranks lacks a sample."""
    replaced = OpenSteps.replace

    def lacking(
        steps: OpenSteps, number: int, micro_batches: MicroBatches, *others: Any, **named: Any
    ) -> None:
        (first, *parts), *ranks = micro_batches
        replaced(steps, number, ((first[1:], *parts), *ranks), *others, **named)

    plant(OpenSteps, "replace", lacking)


@planted
def forget_a_rewound_step() -> None:
    """P1: a trainer that goes back to a checkpoint is not given the first step after it."""
    take_after = Checkpoints._remove_after

    def lacking(retained: Checkpoints, number: int) -> list[OpenStep]:
        return take_after(retained, number)[1:]

    plant(Checkpoints, "_remove_after", lacking)
