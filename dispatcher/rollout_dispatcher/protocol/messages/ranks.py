"""What DP ranks and the dispatcher say to each other.

dispatcher               DP rank
<------   Demand, PolicyVersion
StepHeader     ------>
MicroBatch     ------>   (once per micro-batch, payload attached)
<------   Prepared, or Unresolved  (samples of it are gone: it is planned anew)
StepWithdrawn  ------>   (nothing is left of it)
Release        ------>   (every rank is prepared: training may see it)
LastStep       ------>   (another rank left: none may begin a later one)
<------   Commit, CheckpointSaved  (with it what the step took, if that is known by then)
<------   StepTimes                (or as soon as it is)
Advice         ------>   (for people: what the trainer should know of itself)
<------   Finish           (instead of another Demand: this rank has had enough)
End            ------>
"""

from typing import Annotated, Self

from pydantic import Field as Declared
from pydantic import model_validator

from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.protocol.messages.base import (
    Count,
    Extent,
    Message,
    Name,
    Part,
    Total,
    Version,
    Watermark,
    Why,
)
from rollout_dispatcher.protocol.messages.samples import MAX_SAMPLES, HasFields, HasSamples
from rollout_planner.types import UPDATE

#: Micro-batches of a rank in a step whose times can be told.
MAX_TIMED = 1 << 16
#: Passes whose times a commit has with it: most steps have one or two.
MAX_PASSES = 8
#: Up to years, so that sums and quotients of them stay finite.
Seconds = Annotated[float, Declared(ge=0, le=1e9, allow_inf_nan=False)]
Times = Annotated[list[Seconds], Declared(min_length=1, max_length=MAX_TIMED)]


class Demand(Message):
    """What a training loop does.

    taken: last step that it has begun, -1 for none.
    hungry: whether it waits for the next one.
    """

    type_code = 11
    taken: Watermark
    hungry: bool


class PolicyVersion(Message):
    """DP rank 0 has a new version of the weights.

    policy_version: which.
    first_step: the first step that trains with it.
    """

    type_code = 12
    policy_version: Version
    first_step: Count


class StepHeader(HasFields):
    """What is known of a step before its micro-batches; the same on every DP rank.

    fields: of the samples of all its micro-batches.
    step: its number, from 0.
    digest: of its plan: who holds another one, holds another step.
    num_micro_batches: of every rank.
    num_samples: of all ranks.
    tokens: of all samples.
    loss_tokens: of all samples, for normalisation.
    loss_samples: samples with at least one loss token, for normalisation.
    group_loss_tokens: of each group, by its number in the step, with the capability `group-totals`;
        a sample without a group is one of its own. Left out where no sample has one.
    expected_loss_tokens: loss tokens that `num_samples` mean arrivals have, fixed when the step was
        planned: with the capability `expected-loss`, left out without it.
    attempt: how often the step was planned anew because samples could not be resolved; what was
        said of an earlier attempt is void. With the capability `references`; left out if 0.
    num_referenced: samples of all ranks that lie in payload stores; left out if 0. If there are
        any, a rank is prepared once it holds all of its micro-batches, those samples fetched.
    """

    type_code = 13
    optional = ("attempt", "num_referenced")
    step: Count
    digest: Name
    num_micro_batches: Extent
    num_samples: Extent
    tokens: Total
    loss_tokens: Count
    loss_samples: Count
    group_loss_tokens: list[Count] | None = None
    expected_loss_tokens: Count | None = None
    attempt: Count = 0
    num_referenced: Count = 0


class MicroBatch(HasSamples):
    """One micro-batch of one DP rank; payload: a block a field, as its samples' values.

    step: that it is of.
    index: its place, from 0; a rank gets them in order.
    is_filler: whether it is there for the number's sake: it carries the first token of some sample
        of the step, with no loss tokens.
    group_numbers: which entry of the step's `group_loss_tokens` is of each sample's group; left out
        where there are none, and of a filler.
    attempt: of the step, as in its header; left out if 0.
    """

    type_code = 14
    optional = ("attempt",)
    each = (*HasSamples.each, "group_numbers")
    step: Count
    index: Count
    is_filler: bool = False
    group_numbers: list[Count] | None = None
    attempt: Count = 0

    def spans(self, nbytes: int) -> tuple[int]:
        """All in one piece: what it says of its fields is held against the step's header."""
        return (nbytes,)


class Prepared(Message):
    """The rank holds a step's header and can train it. Said of steps in their order.

    step: which.
    digest: of its plan.
    attempt: of the step, as in its header; left out if 0. Of an earlier one it is void.
    """

    type_code = 15
    optional = ("attempt",)
    step: Count
    digest: Name
    attempt: Count = 0


class Unresolved(Message):
    """The rank cannot get samples of a step that is not released, with the capability `references`.

    They are dropped, their groups whole, and the step is planned anew as its next attempt.

    step: which.
    attempt: of the step, as in its header; of an earlier one it is void.
    sample_ids: of those that cannot be had, at most 1,024 at a time.
    why: what their store has said, for people.
    """

    type_code = 29
    step: Count
    attempt: Count
    sample_ids: Annotated[list[Name], Declared(min_length=1, max_length=MAX_SAMPLES)]
    why: Why = ""


class StepWithdrawn(Message):
    """Nothing is left of a step that is not released, with the capability `references`.

    The rank lets go of it, if it holds it. One of the same number may follow, as a later attempt.

    step: which; none after it is announced.
    """

    type_code = 34
    step: Count


class Release(Message):
    """Every DP rank is prepared: the training loop may have a step.

    step: which.
    """

    type_code = 16
    step: Count


class LastStep(Message):
    """Another DP rank has left, or is lost: no step after this one may begin, prepared or not.

    A rank whose training loop asks for a later one says so in `Demand`, and gets an `Error`.

    step: the last one, -1 for none at all; null: it was found again, and there is no such limit.
    """

    type_code = 35
    step: Watermark | None = None


class PassTimes(Part):
    """What one pass over a step's micro-batches took.

    Times are in seconds, one a micro-batch in order, summed where the pass goes over them more than
    once.

    cost_key: which pass: `update` trains, others (`log-prob`, `critic`) have the trainer's names.
    busy_s: from each micro-batch's begin to its end, time inside collectives included.
    collective_s: how much of that the rank was inside collectives, whether it waited for others
        there or bytes were on their way; null where that cannot be told apart.
    why: why it cannot, for people.
    """

    cost_key: Name = UPDATE
    busy_s: Times
    collective_s: Times | None = None
    why: Annotated[str, Declared(max_length=200)] = ""

    @model_validator(mode="after")
    def _one_a_micro_batch(self) -> Self:
        if self.collective_s is not None and len(self.collective_s) != len(self.busy_s):
            raise ValueError(
                f"collective_s has {len(self.collective_s)} entries for {len(self.busy_s)} "
                "micro-batches"
            )
        return self


class Commit(Message):
    """The rank has applied every step up to one.

    step: the last of them.
    times: what passes over that step took, as far as it is known by now, with the capability
        `commit-times`: with 65,536 micro-batches altogether at most. Others follow in StepTimes.
    """

    type_code = 17
    step: Count
    times: Annotated[list[PassTimes], Declared(min_length=1, max_length=MAX_PASSES)] | None = None

    @model_validator(mode="after")
    def _as_many_as_alone(self) -> Self:
        if self.times is not None and sum(len(each.busy_s) for each in self.times) > MAX_TIMED:
            raise ValueError(f"times of more than {MAX_TIMED} micro-batches")
        return self


class End(Message):
    """No step will follow.

    reason: `finished` where the DP ranks have finished the run: steps after that are void; `ended`
        where producers or a controller have ended the stream, `drained` where the dispatcher shuts
        down: steps that were announced before still come.
    """

    type_code = 18
    reason: Annotated[EndReason, Declared(strict=False)]


class Finish(Message):
    """The training loop has had enough: it takes no further step.

    Once every DP rank has said so, after the same step and with the same words, the run is
    finished, which `End` says. Where they differ, or one goes on, all get an `Error`.

    step: the last one that the rank has committed, -1 for none.
    discard: samples that are not used are dropped, though a journal could keep them.
    """

    type_code = 36
    step: Watermark
    discard: bool = False


class CheckpointSaved(Message):
    """A checkpoint is durable; DP rank 0 speaks for all.

    step: the last step that is in it, -1 for none.
    """

    type_code = 23
    step: Watermark


class StepTimes(PassTimes, Message):
    """What one pass over a step's micro-batches took, with the capability `step-times`.

    Said once a pass, with or after the step's Commit, unless that has told it; nobody waits for it.

    step: which.
    """

    type_code = 28
    step: Count
