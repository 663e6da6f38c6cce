"""The planted bugs: each breaks one promise, or forgets that one message may be lost or repeated.

A bug is a function that changes the classes of its process. What it changes is as public and as
high up as can be, and has to be there: a bug that is planted nowhere would never be caught.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import sleep
from typing import Any

from rollout_dispatcher.core.buffer.admission import Admission
from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.dispatch import Dispatch
from rollout_dispatcher.core.effects import Deliver, Effect, Redelivered
from rollout_dispatcher.core.producers.duplicates import DuplicateMemory
from rollout_dispatcher.core.ranks.generation import Generation
from rollout_dispatcher.core.ranks.rank_state import RankHello, RankState
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.core.steps.open_steps import OpenSteps
from rollout_dispatcher.core.steps.retained import RetainedSteps
from rollout_dispatcher.core.steps.step import MicroBatches, OpenStep
from rollout_dispatcher.journal.store import Store
from rollout_dispatcher.sample import Sample
from rollout_dispatcher.service.durability.barrier import DurabilityBarrier

#: A slow disk: what is acknowledged early is in danger for so long.
SYNC_S = 1.0
#: The step that holds the samples of the one before it, in `repeat_a_step`.
REPEATED = 5
#: The sample that is passed over in `starve_a_sample`, and until how many have come.
STARVED, FED_AFTER = 30, 600

Bug = Callable[[], None]
BUGS: dict[str, Bug] = {}


def planted(bug: Bug) -> Bug:
    """Make it known under its name, with dashes."""
    BUGS[bug.__name__.replace("_", "-")] = bug
    return bug


def plant(owner: type, name: str, method: Callable[..., object]) -> None:
    """Put a method in the place of one that is there."""
    assert hasattr(owner, name), f"{owner.__name__} has no {name} any more: plant elsewhere"
    setattr(owner, name, method)


# -- what was acknowledged, and what is said again ------------------------------------------------


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
def forget_ids() -> None:
    """P3, Push: what another process of a producer pushes again under its ids is stored again."""
    seen, are_new = DuplicateMemory.seen, DuplicateMemory.are_new

    def nameless(memory: DuplicateMemory, producer: str, seq: int, _: str | None) -> bool:
        return seen(memory, producer, seq, None)

    def all_nameless(
        memory: DuplicateMemory, producer: str, numbers: range, _: Sequence[str]
    ) -> bool:
        return are_new(memory, producer, numbers, ())

    plant(DuplicateMemory, "seen", nameless)
    plant(DuplicateMemory, "are_new", all_nameless)


@planted
def forget_the_end() -> None:
    """P8, EndStream: that the stream has ended is not made durable."""
    _forget_facts("StreamEnded", "ProducerSaid")


# -- what becomes of samples ----------------------------------------------------------------------


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
    """P3: a step is delivered as a new one once more, in the place of other samples."""
    add = OpenSteps.add
    before: list[MicroBatches] = []

    def again(steps: OpenSteps, micro_batches: MicroBatches, dp_size: int, now: float) -> OpenStep:
        if steps.next_step == REPEATED:
            micro_batches = before[-1]
        before.append(micro_batches)
        return add(steps, micro_batches, dp_size, now)

    plant(OpenSteps, "add", again)


@planted
def miscount_loss_tokens() -> None:
    """P5, Step: its header tells other loss totals than its samples have."""
    samples_of = OpenStep.samples

    def counting_one_twice(step: OpenStep) -> list[Sample]:
        samples = samples_of(step)
        return [samples[0]._replace(loss_tokens=samples[0].loss_tokens + 1), *samples[1:]]

    plant(OpenStep, "samples", counting_one_twice)


# -- ranks come and go ----------------------------------------------------------------------------


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

    def forgetful(steps: OpenSteps, dp_size: int) -> list[Redelivered]:
        effects = start_over(steps, dp_size)
        if steps:
            steps.commit(min(steps))
        return effects

    plant(OpenSteps, "start_over", forgetful)


@planted
def change_a_redelivery() -> None:
    """P2: a new generation is given open steps with its ranks' shares exchanged."""
    start_over = OpenSteps.start_over

    def changing(steps: OpenSteps, dp_size: int) -> list[Redelivered]:
        effects = start_over(steps, dp_size)
        for number, step in list(steps.items()):
            steps.replace(number, step.micro_batches[::-1], step.dp_size)
        return effects

    plant(OpenSteps, "start_over", changing)


@planted
def lose_a_sample_for_another_size() -> None:
    """P1: an open step that is planned again for another number of ranks lacks a sample."""
    replaced = OpenSteps.replace

    def lacking(steps: OpenSteps, number: int, micro_batches: MicroBatches, dp_size: int) -> None:
        (first, *parts), *ranks = micro_batches
        replaced(steps, number, ((first[1:], *parts), *ranks), dp_size)

    plant(OpenSteps, "replace", lacking)


@planted
def forget_a_rewound_step() -> None:
    """P1: a trainer that goes back to a checkpoint is not given the first step after it."""
    take_after = RetainedSteps.take_after

    def lacking(retained: RetainedSteps, number: int) -> list[OpenStep]:
        return take_after(retained, number)[1:]

    plant(RetainedSteps, "take_after", lacking)


# -- what ranks say -------------------------------------------------------------------------------


@planted
def one_commit_is_enough() -> None:
    """P1, Commit: a step is committed when the first of its ranks says so."""

    def by_anybody(generation: Generation, step: int) -> bool:
        return any(rank.committed >= step for rank in generation.ranks.values())

    plant(Generation, "has_committed", by_anybody)


@planted
def forget_commits() -> None:
    """P1, Commit: it is not made durable, so a restart brings committed steps back."""
    _forget_facts("Committed")


@planted
def lose_commits() -> None:
    """P8, Commit: one that was lost is not heard in the rank's next hello."""
    _mishear_hello(committed=-1)


@planted
def count_commits_twice() -> None:
    """P1, Commit: what a rank says again in a hello is counted again."""
    join = Dispatch.join

    def counting(core: Dispatch, hello: RankHello, now: float) -> Any:
        effects = join(core, hello, now)
        core.totals.samples_committed += hello.committed >= 0
        return effects

    plant(Dispatch, "join", counting)


@planted
def lose_demands() -> None:
    """P8, Demand: one that was lost is not heard in the rank's next hello."""
    came_back = RankState.came_back

    def deaf(rank: RankState, hello: RankHello, now: float) -> None:
        came_back(rank, replace(hello, taken=-1, hungry=False), now)

    plant(RankState, "came_back", deaf)


@planted
def lose_checkpoints() -> None:
    """P7, CheckpointSaved: one that was lost is not heard in the rank's next hello."""
    _mishear_hello(saved=-1)


@planted
def skip_known_headers() -> None:
    """P8, Prepared: who holds a step's header is not asked for its word once more."""
    _redeliver(lambda hello, effect: None if effect.step in hello.received else effect)


@planted
def skip_micro_batches() -> None:
    """P8, MicroBatch: what was under way when a connection ended is not sent again."""
    _redeliver(lambda _, effect: replace(effect, first_micro_batch=1 << 20))


@planted
def release_once() -> None:
    """P8, Release: a rank that missed it is not told again."""
    prepared = StepLedger.prepared

    def once(ledger: StepLedger, dp_rank: int, number: int, digest: str) -> list[Effect]:
        released = number in ledger.steps and ledger.steps[number].state == "released"
        effects = prepared(ledger, dp_rank, number, digest)
        return [] if released else effects

    plant(StepLedger, "prepared", once)


# -- ways to plant --------------------------------------------------------------------------------


def _forget_facts(*kinds: str) -> None:
    take = Dispatch.take_facts

    def selective(core: Dispatch) -> list[object]:
        return [fact for fact in take(core) if type(fact).__name__ not in kinds]

    plant(Dispatch, "take_facts", selective)


def _mishear_hello(**values: Any) -> None:
    join = Dispatch.join

    def mishearing(core: Dispatch, hello: RankHello, now: float) -> Any:
        return join(core, replace(hello, **values), now)

    plant(Dispatch, "join", mishearing)


def _redeliver(change: Callable[[RankHello, Deliver], Deliver | None]) -> None:
    """Change what a rank is given that comes back."""
    join = Dispatch.join

    def changing(core: Dispatch, hello: RankHello, now: float) -> list[Effect]:
        known = core.ledger.ranks.get(hello.dp_rank)
        back = known is not None and known.client_id == hello.client_id
        effects: list[Effect] = []
        for effect in join(core, hello, now):
            changed = change(hello, effect) if back and isinstance(effect, Deliver) else effect
            effects += [] if changed is None else [changed]
        return effects

    plant(Dispatch, "join", changing)
