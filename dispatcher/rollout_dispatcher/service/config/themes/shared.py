"""What `serve` and `simulate` have in common: how a step is cut and what may be chosen for it."""

from pydantic import BaseModel, ConfigDict

from rollout_dispatcher.service.config.types import NotNegative, Positive, Variation
from rollout_dispatcher.service.config.units import DurationOrNothing
from rollout_planner.types import Layout, MicroBatchOrder, Sync


class Options(BaseModel):
    """Fields that are options: frozen, none unknown, the docstring under each is its help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )


class StepOptions(Options):
    """Steps: their size, and how they are cut into micro-batches."""

    dp_size: Positive
    """DP ranks"""
    dispatch_batch_size: Positive | None = None
    """samples in one step over all DP ranks, gradient accumulation included"""
    micro_batch_size: Positive | None = None
    """samples in a micro-batch; this or --micro-batch-tokens"""
    micro_batch_tokens: Positive | None = None
    """token budget of a micro-batch, which then holds any number of samples; with --layout padded
    their count times the longest stays within it"""
    micro_batch_multiple: Positive = 1
    """round a rank's number of micro-batches up to a multiple of this (virtual pipeline stages);
    they are split for it, and empty only where samples are fewer"""
    min_micro_batches: Positive = 1
    """micro-batches a rank has at least, as pipelines need; they are split for it, and empty only
    where samples are fewer"""
    sample_length_multiple: Positive = 1
    """ranks pad each sample to a multiple of so many tokens (context parallelism, FP8), padded
    micro-batches the longest one; counted in costs and in --micro-batch-tokens"""
    layout: Layout = Layout.PACKED
    """packed (samples end to end, cu_seqlens) or padded (to the longest of the micro-batch)"""
    sync: Sync = Sync.MICRO_STEP
    """where ranks wait for each other: micro-step (FSDP, ZeRO-3) or step (DDP with no_sync)"""
    rank_tokens: Positive | None = None
    """most tokens of a step on one DP rank, as they are padded; the step is smaller where need be;
    what exceeds it by itself has a rank to itself, and a step that is planned again goes whole"""
    pipeline_stages: Positive = 1
    """pipeline stages of a model replica: a DP rank's largest micro-batch then counts once more for
    each stage beyond the first, as every stage waits for it while the pipeline fills and drains"""
    micro_batch_order: MicroBatchOrder | None = None
    """in which order a rank trains on a step's micro-batches, by tokens: peak-first (memory is
    reserved once), ends-small (a pipeline fills and drains fast) or as-planned; unset: peak-first,
    with pipeline stages ends-small"""


class SelectionOptions(Options):
    """What a sample costs, and how long it may be passed over."""

    cost: str = "auto"
    """work of a sample of s tokens: tokens; quadratic:a,b,c,d for a*s*s + b*s + c, and d for each
    micro-batch; hf:PATH for a Hugging Face config.json; auto, or auto: and one of these to begin
    with: fitted to what micro-batches take, once that predicts them better"""
    max_skips: NotNegative | None = None
    """dispatches that may pass a sample over; unset: 4 windows' worth, at least 6"""
    outlier_max_skips: NotNegative | None = None
    """the same for samples that cost more than the mean rank's share; unset: --max-skips"""
    max_step_variation: Variation = 0.25
    """how far a step's loss tokens may stray from the mean step's, as a share of these, so that
    under token-mean no sample weighs much less or more for its neighbours; more where arrivals
    stray as far by themselves; off: as far as balance has it"""
    planning_budget: DurationOrNothing = 0.005
    """what a split may spend to wait less, on one core: trades between micro-batches, further ways
    to share whole groups out, padded runs cut anew; counted in operations, not timed, so that plans
    do not depend on the machine; 0s tries none of these"""
