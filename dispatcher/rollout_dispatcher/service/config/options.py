"""The options of `dispatcher serve`: each declared once, by theme.

A field is a flag (`--window`), an environment variable (`DISPATCHER_WINDOW`), a TOML key (`window`)
and, with the docstring under it, a line of help. An `Advanced` field is set by `--set NAME=VALUE`
and in the table [advanced] of a file. A `Fixed` field is set in Python alone.
"""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from rollout_dispatcher.core.buffer.phases import StalenessPolicy
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.protocol.messages import MAX_OPEN_STEPS
from rollout_dispatcher.service.config.values import (
    HTTP_PLANE,
    Address,
    Advanced,
    DeclaredField,
    Duration,
    DurationOrNothing,
    Fixed,
    IncompleteGroups,
    JournalSync,
    LastBatch,
    LogFormat,
    LogLevel,
    Multiple,
    NotNegative,
    Positive,
    Ratio,
    Retain,
    Size,
    SizeOrNothing,
    StoreAddress,
    Variation,
    one_or_several,
    split_commas,
)
from rollout_planner.types import Grouping, Layout, MicroBatchOrder, Oversize, Strategy, Sync


class Options(BaseModel):
    """Fields that are options; the docstring under each is its help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )


class StepOptions(Options):
    """The size of steps, and their micro-batches."""

    dp_size: Positive
    """number of DP ranks"""
    global_batch_size: Positive | None = None
    """samples in one step over all DP ranks, gradient accumulation included"""
    micro_batch_size: Positive | None = None
    """samples in a micro-batch; this or --micro-batch-tokens"""
    micro_batch_tokens: Positive | None = None
    """token budget of a micro-batch; with --layout padded its samples times the longest stay within
    it"""
    micro_batch_multiple: Positive = 1
    """multiple to which a rank's number of micro-batches is rounded up (virtual pipeline stages),
    by splitting some; empty ones are made only where there are too few samples"""
    min_micro_batches: Advanced[Positive] = 1
    """least number of micro-batches of a rank, as pipelines need; larger ones are split, and empty
    ones are made only where there are too few samples"""
    sample_length_multiple: Positive = 1
    """ranks pad each sample, in padded micro-batches the longest one, to a multiple of so many
    tokens (context parallelism, FP8); padding counts in costs and in --micro-batch-tokens"""
    layout: Layout = Layout.PACKED
    """layout of a micro-batch: packed (samples end to end, cu_seqlens) or padded (to its
    longest)"""
    sync: Sync = Sync.MICRO_STEP
    """barrier at which DP ranks meet: micro-step (FSDP, ZeRO-3) or step (DDP with no_sync)"""
    rank_tokens: Advanced[Positive | None] = None
    """most tokens of a step on one DP rank, padding included; a step is made smaller to keep it, a
    sample or group above it gets a rank of its own, and a step that is planned again keeps all its
    samples"""
    max_split: Advanced[Positive] = 1
    """most DP ranks (2, 4, 8 ...) that train a packed micro-batch together (context parallel), with
    as many times the tokens, where a sample is longer than a rank's share; the oldest samples are
    taken, so set --window 1, and all ranks count as equally fast; make streams with the same
    number; 1: off"""
    pipeline_stages: Positive = 1
    """number of pipeline stages of a model replica; a rank's largest micro-batch counts once more
    for each stage beyond the first, as all wait for it at fill and drain"""
    micro_batch_order: Advanced[MicroBatchOrder | None] = None
    """order in which a rank trains on a step's micro-batches, by tokens: peak-first (memory is
    reserved once), ends-small (a pipeline fills and drains fast) or as-planned; unset: peak-first,
    with pipeline stages ends-small; with max-split and --sync step, blocks first"""


class SelectionOptions(Options):
    """Cost of samples, and bounds on their delay."""

    cost: str = "auto"
    """work of a sample of s tokens: auto (fitted as it runs), auto:COST (begin with that one),
    tokens, quadratic:a,b,c,d (a*s*s + b*s + c, and d a micro-batch), hf:PATH (a Hugging Face
    config.json)"""
    max_delay: NotNegative | None = None
    """dispatches that may pass a sample over; unset: 4 windows, at least 6"""
    outlier_max_delay: Advanced[NotNegative | None] = None
    """dispatches that may pass over a sample that costs more than the mean rank's share; unset:
    --max-delay"""
    max_step_variation: Variation = 0.25
    """largest deviation of a step's loss tokens from the mean step's, as a share of that (or the
    standard deviation of arrivals, if it is more); keeps a sample's weight under token-mean nearly
    the same in every step; off: no bound"""
    planning_budget: Advanced[DurationOrNothing] = 0.005
    """time that a split may take on one core to shorten the ranks' waiting: trades between
    micro-batches, further ways to share whole groups out, padded runs cut anew; counted in
    operations, so that plans do not depend on the machine; 0s: none of these"""


class _StepsAndWindow(StepOptions):
    """The size of steps, and the buffer of samples."""

    dp_size: Positive
    """number of DP ranks of the first process group; one of another size is refused, and all ranks
    have to join before training starts"""
    allow_dp_resize: Advanced[bool] = True
    """accept later process groups with another number of DP ranks; open steps are planned again for
    them with the same samples, and --global-batch-size stays"""
    global_batch_groups: Positive | None = None
    """groups in one step over all DP ranks, of any size; a sample without a group counts as one"""
    window: Multiple = 1.5
    """samples to choose a step from, in dispatch batches: 1 leaves no choice, 1.25 has most of the
    gain, 1.5 nearly all; beyond 2 is rarely worth the delay"""
    buffer_capacity: Positive | None = None
    """ready samples (or groups, as the batch is counted) at which producers wait, at least the
    window; members of groups under way never wait for it; unset: the window"""
    buffer_tokens: Advanced[Positive | None] = None
    """tokens of ready samples at which producers wait; unset: no cap on tokens"""
    buffer_bytes: Size | None = None
    """payload bytes in memory, of ready samples and of groups under way; never exceeded; unset: a
    quarter of the machine's or cgroup's memory"""
    blocked_push_bytes: Advanced[Size | None] = None
    """payload bytes of blocked pushes; payloads beyond it are discarded, and resent by their
    producers in turn; unset: a sixteenth of the memory"""
    receive_bytes: Advanced[Size | None] = None
    """bytes of frames and request bodies that are being received, over all connections; at the
    limit producers wait in turn, HTTP is answered 503, and a transfer slower than 1 MiB/s over one
    request-timeout is ended; unset: a sixteenth of the memory, at least max-frame-bytes and
    max-body-bytes"""
    fields: Annotated[tuple[DeclaredField, ...], BeforeValidator(split_commas)] = ()
    """fields of every sample, as name:dtype, name:dtype:per-sample, name:dtype:ragged or name:str,
    repeatable or with commas; samples with others are refused; unset: those of the first accepted
    push"""
    allow_non_finite: Advanced[bool] = False
    """accept NaN and infinities over HTTP; rollout workers have `allow_non_finite=True`"""


class ServeOptions(SelectionOptions, _StepsAndWindow):  # pydantic has the last base's fields first
    """All options of `dispatcher serve`; `ServeConfig.HEADINGS` has the themes."""

    strategy: Strategy = Strategy.WINDOW
    """strategy that chooses and splits a step: window, or for comparison round-robin, greedy, kk"""
    groups: Grouping = Grouping.STEP
    """unit that keeps a group whole: ignore (none), step, rank, micro-batch"""
    group_size: Positive | None = None
    """samples of each prompt; unset: the size that each push names"""
    incomplete_groups: Advanced[IncompleteGroups] = IncompleteGroups.DROP
    """fate of a group that will never be complete: drop it, or keep (train on the members that
    came)"""
    on_oversize: Oversize = Oversize.ERROR
    """action for a sample longer than --micro-batch-tokens: error (refuse it), alone (give it a
    micro-batch of its own), drop (accept, count and discard it)"""
    max_imbalance: Ratio = 0.01
    """share of trainer time that a plan may lose to stragglers and still go before the window is
    full"""
    max_wait: Duration = 2.0
    """time that a rank waits before a whole batch is dispatched whatever the window and the plan; a
    smaller one goes where --buffer-bytes is full, or at the end of a phase or of the stream"""
    max_open_steps: Annotated[int, Field(ge=1, le=MAX_OPEN_STEPS)] = 4
    """steps that may be planned and not committed; at most 1024"""
    max_staleness: NotNegative | None = None
    """policy versions that a sample may lag behind the trainer's; samples then need a version,
    unless they are pushed as exempt; unset: any"""
    on_stale: Advanced[StalenessPolicy] = StalenessPolicy.DROP
    """action for a sample that would be too stale: drop it, or prefer-oldest (train on it before
    newer)"""
    steps_per_version: Positive = 1
    """optimizer steps of the trainer with one policy version"""
    group_timeout: Advanced[Duration] = 600.0
    """time without a new member after which a group is dropped, or kept, once none of its producers
    is connected; while one is, its rollouts may take their time"""
    producer_timeout: Advanced[Duration] = 60.0
    """time after which a producer that left without a goodbye counts as gone: groups, and the end
    of a phase or of the stream, wait for it no longer"""
    final_batch: Advanced[LastBatch] = LastBatch.FLUSH
    """fate of the partial batch at the end of the stream: flush (a smaller step) or drop"""
    listen: Annotated[tuple[Address, ...], BeforeValidator(one_or_several), Field(min_length=1)] = (
        Endpoint("127.0.0.1", 7077),
    )
    """address of the sample plane: host:port or unix:/path, repeatable; port 0: any free one"""
    http: Address = HTTP_PLANE
    """address of the HTTP plane (metrics, health, POST /v1/samples): host:port or unix:/path"""
    ready_file: Path | None = None
    """file to which the addresses in use and the run's id are written, as JSON, once it serves"""
    token_file: Path | None = None
    """file with the secret that clients show on both planes; it or --tls-client-ca is needed to
    listen on addresses that other machines reach"""
    producer_token_file: Path | None = None
    """file with a second secret, of rollout workers: with it they may push, close groups and end
    their own phases and stream, and nothing else; needs --token-file"""
    tls_cert: Path | None = None
    """certificate (PEM, with its chain); TCP addresses then serve TLS"""
    tls_key: Path | None = None
    """private key of --tls-cert (PEM, not encrypted)"""
    tls_client_ca: Path | None = None
    """authorities (PEM) of which one must have signed a client's certificate"""
    insecure: bool = False
    """listen on addresses that other machines reach with neither token nor client certificates"""
    journal_dir: Path | None = None
    """directory that keeps accepted samples and open steps, so that a restart goes on with them;
    unset: a restart begins with nothing"""
    journal_sync: JournalSync = "batch"
    """moment at which a push is acknowledged: batch (once synced to the disk), interval:100ms (once
    written, synced so often), off (once written)"""
    sample_retention: Retain | None = None
    """moment at which a step's samples are freed: commit (once it is committed), checkpoint (once a
    saved checkpoint covers it; needs --journal-dir; takes disk, not the buffer's room); unset:
    checkpoint with a journal, commit without"""
    retain_bytes: Advanced[Size | None] = None
    """payload bytes of committed steps that are kept until a checkpoint covers them; beyond it the
    oldest are deleted; unset: a tenth of the volume of --journal-dir, and at most 50GiB; never more
    than half of what the volume has for the journal"""
    payload_stores: Annotated[
        tuple[StoreAddress, ...], BeforeValidator(split_commas), Field(max_length=16)
    ] = ()
    """payload stores for references, such as file:///mnt/rollouts, repeatable or with commas;
    clients open no others, and producers put large payloads into the first that they can open;
    needs --journal-dir; unset: every payload comes through the dispatcher"""
    inline_limit: Advanced[SizeOrNothing] = 2**20
    """bytes from which on a producer puts a payload into the payload store; smaller ones are
    pushed; 0B: none is"""
    prefetch_bytes: Advanced[Size] = 2**31
    """bytes that a DP rank fetches from payload stores for steps that it has not begun; the step
    that its training loop waits for is fetched whole, however large it is"""
    referenced_bytes: Advanced[Size | None] = None
    """payload bytes in payload stores, of ready samples and of groups under way, beyond which
    producers wait; those of open steps come on top; unset: sixteen times --buffer-bytes"""
    max_sample_tokens: Advanced[Annotated[int, Field(ge=1, lt=2**31)]] = 2**20
    """tokens beyond which a sample is refused"""
    max_frame_bytes: Advanced[Size] = 256 * 2**20
    """bytes beyond which a frame is refused"""
    max_body_bytes: Advanced[Size] = 4 * 2**20
    """bytes beyond which an HTTP request body is refused; cut larger ones into several requests"""
    producer_credits: Advanced[Positive] = 8
    """pushes that a producer may have unanswered"""
    max_connections: Advanced[Positive] = 4096
    """connections at a time on each plane, as far as the limit on open files allows; on the HTTP
    plane idle ones make room"""
    max_pending_connections: Fixed[Positive] = 512
    """connections on each plane beside these before their hello or first request; beyond it others
    wait to be accepted, and the oldest make room for them"""
    handshake_timeout: Fixed[Duration] = 10.0
    """time in which a connection has to send its hello, or first request"""
    request_timeout: Advanced[Duration] = 60.0
    """time in which an HTTP request has to arrive whole; also the time over which the least rate of
    receive-bytes is measured"""
    write_timeout: Fixed[Duration] = 60.0
    """time after which a connection is closed whose peer does not read"""
    idle_timeout: Advanced[Duration] = 300.0
    """time without a whole message, heartbeats included, after which a producer's or HTTP
    connection is closed"""
    heartbeat_interval: Advanced[Duration] = 5.0
    """time between two heartbeats of a client"""
    rank_timeout: Duration = 60.0
    """time of silence, heartbeats included, after which a DP rank's connection is closed; its steps
    stay open for it or its successor. A rank without a connection for as long is lost, and the
    others get an error that names it when they ask for a further step"""
    drain_timeout: Advanced[Duration] = 25.0
    """time to wait after SIGTERM for open steps to be committed; less than the 30 s that pods have
    by default"""
    sample_id_horizon: Advanced[NotNegative] = 1_000_000
    """sample ids of producers that are remembered to recognise repeats, and as many ids of groups
    that have ended, to refuse late members"""
    record_dir: Path | None = None
    """directory for arrivals, plans and times, which dispatcher simulate, report and calibrate
    read; no payloads, no ids; see docs/operate.md"""
    record_bytes: Advanced[Annotated[Size, Field(ge=2**20)]] = 2**30
    """bytes of the record on disk, beyond which its oldest part is deleted"""
    per_rank_metrics: Advanced[bool] = True
    """export one series a DP rank; off for very many ranks"""
    progress_interval: Fixed[Duration | None] = 10.0
    """time between log lines on how the run gets on, if anything has changed; none: never"""
    log_level: LogLevel = LogLevel.INFO
    """severity from which on messages are logged"""
    log_format: LogFormat = LogFormat.AUTO
    """format of the log: auto (text on a terminal, else JSON), json or text"""
