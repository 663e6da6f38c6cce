"""How samples become steps: which wait, which are chosen, when, and what becomes of the others."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from rollout_dispatcher.core.buffer.phases import StalenessPolicy
from rollout_dispatcher.protocol.messages import MAX_OPEN_STEPS
from rollout_dispatcher.service.config.fields import DeclaredField
from rollout_dispatcher.service.config.themes.shared import Options, SelectionOptions, StepOptions
from rollout_dispatcher.service.config.types import (
    IncompleteGroups,
    LastBatch,
    Multiple,
    NotNegative,
    Positive,
    Ratio,
    split_commas,
)
from rollout_dispatcher.service.config.units import Duration, Size
from rollout_planner.types import Grouping, Oversize, Strategy


class ServedSteps(StepOptions):
    """Steps of trainers that come and go."""

    dp_size: Positive
    """DP ranks of the first process group, which is refused if it has another number; all must be
    there before training starts"""
    elastic: bool = True
    """let later process groups bring another number of DP ranks; open steps are planned again for
    them with the same samples, and --dispatch-batch-size stays"""
    dispatch_batch_size: Positive | None = None
    """samples in one step over all DP ranks, gradient accumulation included; this or
    --dispatch-batch-groups"""
    dispatch_batch_groups: Positive | None = None
    """groups in one step over all DP ranks, whatever their sizes; a sample without a group counts
    as one"""


class WindowOptions(Options):
    """Window and buffer."""

    window_multiple: Multiple = 1.5
    """samples to choose a step from, in dispatch batches; 1 means no choice, 1.25 has most of the
    gain and 1.5 nearly all, beyond 2 is rarely worth the delay"""
    buffer_capacity: Positive | None = None
    """ready samples (or groups, as the batch is counted) at which producers must wait, at least the
    window; members of groups under way never wait for it; unset: the window"""
    buffer_tokens: Positive | None = None
    """tokens of ready samples at which producers must wait; unset: no cap on tokens"""
    buffer_bytes: Size | None = None
    """payload bytes in memory, of ready samples and of groups under way; nothing exceeds it; unset:
    a quarter of the memory of the machine or control group"""
    held_bytes: Size | None = None
    """payload bytes of pushes that wait; what comes beyond is let go, and asked for again when its
    turn comes; unset: a sixteenth of the memory"""
    receive_bytes: Size | None = None
    """bytes of frames and request bodies that are being received, over all connections; beyond it
    producers wait in turn, HTTP is answered 503, and what comes at less than 1 MiB/s over a
    --request-timeout is given up; unset: a sixteenth of the machine's or cgroup's memory, at least
    --max-frame-bytes and --max-body-bytes"""


class SampleOptions(Options):
    """Samples."""

    fields: Annotated[tuple[DeclaredField, ...], BeforeValidator(split_commas)] = ()
    """what every sample has, as name:dtype, name:dtype:per-sample, name:dtype:ragged or name:str,
    repeatable or with commas; others are refused; unset: as in the first accepted push"""
    allow_non_finite: bool = False
    """take NaN and infinities over HTTP; rollout workers say `allow_non_finite=True`"""


class PlanningOptions(SelectionOptions):
    """Planning."""

    strategy: Strategy = Strategy.WINDOW
    """how a step is chosen and split: window, or for comparison round-robin, greedy, kk"""
    groups: Grouping = Grouping.STEP
    """what stays together of a group: ignore (nothing), step (one step), rank (one DP rank),
    micro-batch (one micro-batch)"""
    group_size: Positive | None = None
    """samples of one prompt; unset: each push says"""
    incomplete_groups: IncompleteGroups = IncompleteGroups.DROP
    """a group that will never be whole: drop it, or keep (train on the members that came)"""
    oversize: Oversize = Oversize.ERROR
    """a sample longer than --micro-batch-tokens: error (refuse it), alone (give it a micro-batch
    of its own), drop (accept, count and discard it)"""


class DispatchOptions(Options):
    """When to dispatch."""

    target_excess: Ratio = 0.01
    """dispatch before the window is full once the plan wastes no more trainer time than this"""
    max_wait: Duration = 2.0
    """once a rank has waited for so long, dispatch a whole batch if one is ready, whatever the
    window and the plan; less than a batch goes where --buffer-bytes is full, or at the end of a
    phase or of the stream"""
    max_open_steps: Annotated[int, Field(ge=1, le=MAX_OPEN_STEPS)] = 4
    """steps that may be planned but not committed; at most 1024"""


class FreshnessOptions(Options):
    """Freshness, groups and the end of the stream."""

    max_staleness: NotNegative | None = None
    """policy versions that a sample may lag behind the trainer's, and samples have to say theirs
    unless they are pushed as exempt; unset: any"""
    staleness_policy: StalenessPolicy = StalenessPolicy.DROP
    """a sample that would be too stale: drop it, or prefer-oldest (train on it before newer)"""
    steps_per_version: Positive = 1
    """optimizer steps that the trainer takes with samples of one policy version"""
    group_timeout: Duration = 600.0
    """give a group up when nothing has come of it for so long and none of its producers is there
    any more; while one is, its rollouts may take their time"""
    producer_timeout: Duration = 60.0
    """a producer that left without a goodbye counts as gone after this: groups, and the end of a
    phase or of the stream, wait for it no longer"""
    last_batch: LastBatch = LastBatch.FLUSH
    """the partial batch at the end of the stream: flush (a smaller step) or drop"""
