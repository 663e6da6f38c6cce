"""What DP ranks and the dispatcher say to each other.

dispatcher               DP rank
<------   Demand, PolicyVersion
StepHeader     ------>
MicroBatch     ------>   (once per micro-batch, payload attached)
<------   Prepared
Release        ------>   (every rank is prepared: training may see it)
<------   Commit, CheckpointSaved
End            ------>
"""

from rollout_dispatcher.protocol.messages.base import (
    Count,
    Extent,
    Message,
    Name,
    Total,
    Version,
    Watermark,
)
from rollout_dispatcher.protocol.messages.samples import HasFields, HasSamples


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
    """

    type_code = 13
    step: Count
    digest: Name
    num_micro_batches: Extent
    num_samples: Extent
    tokens: Total
    loss_tokens: Count
    loss_samples: Count
    group_loss_tokens: list[Count] | None = None


class MicroBatch(HasSamples):
    """One micro-batch of one DP rank; payload: a block a field, as its samples' values.

    step: that it is of.
    index: its place, from 0; a rank gets them in order.
    is_filler: whether it is there for the number's sake: it carries the first token of some sample
        of the step, with no loss tokens.
    group_numbers: which entry of the step's `group_loss_tokens` is of each sample's group; left out
        where there are none, and of a filler.
    """

    type_code = 14
    each = (*HasSamples.each, "group_numbers")
    step: Count
    index: Count
    is_filler: bool = False
    group_numbers: list[Count] | None = None

    def spans(self, nbytes: int) -> tuple[int]:
        """All in one piece: what it says of its fields is held against the step's header."""
        return (nbytes,)


class Prepared(Message):
    """The rank holds a step's header and can train it.

    step: which.
    digest: of its plan.
    """

    type_code = 15
    step: Count
    digest: Name


class Release(Message):
    """Every DP rank is prepared: the training loop may have a step.

    step: which.
    """

    type_code = 16
    step: Count


class Commit(Message):
    """The rank has applied every step up to one.

    step: the last of them.
    """

    type_code = 17
    step: Count


class End(Message):
    """No step will follow.

    reason: why, in words.
    """

    type_code = 18
    reason: str


class CheckpointSaved(Message):
    """A checkpoint is durable; DP rank 0 speaks for all.

    step: the last step that is in it, -1 for none.
    """

    type_code = 23
    step: Watermark
