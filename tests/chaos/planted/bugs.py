"""Bugs that the checker must find, at least one for each kind of what it says.

Each breaks one promise, or forgets that one message may be lost. A bug is a function that changes
the classes of its process. What it changes is as public and as high up as can be, and has to be
there: a bug that is planted nowhere would never be caught.
"""

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from time import sleep

from rollout_dispatcher.core.admission.producers import DuplicateMemory
from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.buffer.objects import OrphanCollector
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import Decision, Deliver, Effect
from rollout_dispatcher.core.steps.checkpoints import Checkpoints
from rollout_dispatcher.core.steps.generation import Generation
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.core.steps.step import OpenStep, OpenSteps, step_digest
from rollout_dispatcher.journal.store import Store
from rollout_dispatcher.sample import Sample
from rollout_dispatcher.service.barrier import DurabilityBarrier

Bug = Callable[[], None]
BUGS: dict[str, Bug] = {}

#: A slow disk: what is acknowledged early is in danger for so many seconds.
SYNC_S = 1.0
#: The sample that is passed over in `starve_a_sample`, and until how many have come.
STARVED, FED_AFTER = 30, 600


def planted(bug: Bug) -> Bug:
    """Make it known under its name, with dashes."""
    BUGS[bug.__name__.replace("_", "-")] = bug
    return bug


def plant(owner: type, name: str, method: Callable[..., object]) -> None:
    """Put a method in the place of one that is there."""
    assert hasattr(owner, name), f"{owner.__name__} has no {name} any more: plant elsewhere"
    given = signature(getattr(owner, name)).parameters.values()
    named = {item.name: None for item in given if item.kind is item.KEYWORD_ONLY}
    signature(method).bind(*[item for item in given if item.name not in named], **named)
    setattr(owner, name, method)


@planted
def acknowledge_before_durable() -> None:
    """P1: answers leave at once, while their facts are on the way to a slow disk."""
    sync = Store.sync

    def slow_sync(store: Store) -> None:
        sleep(SYNC_S)
        sync(store)

    def at_once(_: DurabilityBarrier, then: Callable[[], None]) -> None:
        then()

    plant(Store, "sync", slow_sync)
    plant(DurabilityBarrier, "after", at_once)


@planted
def forget_duplicates() -> None:
    """P3, Push: one that is sent again, as its answer was lost, is stored again."""
    plant(DuplicateMemory, "seen", lambda *_: False)
    plant(DuplicateMemory, "are_new", lambda *_: True)


@planted
def ignore_caps() -> None:
    """P7: whatever is pushed comes in."""
    plant(SampleBuffer, "soft_cap", lambda *_: None)
    plant(SampleBuffer, "hard_cap", lambda *_: None)


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
def miscount_loss_tokens() -> None:
    """P5, Step: its header tells other loss totals than its samples have."""
    samples_of = OpenStep.samples

    def counting_one_twice(step: OpenStep) -> list[Sample]:
        samples = samples_of(step)
        return [samples[0]._replace(loss_tokens=samples[0].loss_tokens + 1), *samples[1:]]

    plant(OpenStep, "samples", counting_one_twice)


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
            exchanged = step.micro_batches[::-1]
            digest = step_digest(number, exchanged, step.attempt, step.usual_loss)
            steps._steps[number] = replace(step, micro_batches=exchanged, digest=digest)

    plant(OpenSteps, "start_over", changing)


@planted
def forget_a_rewound_step() -> None:
    """P1: a trainer that goes back to a checkpoint is not given the first step after it."""
    take_after = Checkpoints._remove_after

    def lacking(retained: Checkpoints, number: int) -> list[OpenStep]:
        return take_after(retained, number)[1:]

    plant(Checkpoints, "_remove_after", lacking)


@planted
def skip_micro_batches() -> None:
    """P8, MicroBatch: what was under way when a connection ended is not sent again."""
    join = DispatcherCore.join

    def skipping(core: DispatcherCore, hello: RankHello, now: float) -> Decision:
        back = core.client_of(hello.dp_rank) == hello.client_id
        decision = join(core, hello, now)
        effects: list[Effect] = [
            replace(effect, first_micro_batch=1 << 20)
            if back and isinstance(effect, Deliver)
            else effect
            for effect in decision.effects
        ]
        return replace(decision, effects=effects)

    plant(DispatcherCore, "join", skipping)


@planted
def forget_what_was_put() -> None:
    """P7, Sweep: what a producer put and never pushed is looked for by nobody."""
    plant(OrphanCollector, "begins", lambda *_: False)
