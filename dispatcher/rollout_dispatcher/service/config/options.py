"""The options of `dispatcher serve`: each declared once, by theme.

A field is a flag (`--window-multiple`), an environment variable (`DISPATCHER_WINDOW_MULTIPLE`),
a TOML key (`window_multiple`) and, by the docstring under it, a line of help. One that is
`Advanced` has `--set NAME=VALUE` instead of a flag of its own, and stands in the table [advanced]
of a file; one that is `Fixed` is no option at all.
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
    min_micro_batches: Advanced[Positive] = 1
    """micro-batches a rank has at least, as pipelines need; they are split for it, and empty only
    where samples are fewer"""
    sample_length_multiple: Positive = 1
    """ranks pad each sample to a multiple of so many tokens (context parallelism, FP8), padded
    micro-batches the longest one; counted in costs and in --micro-batch-tokens"""
    layout: Layout = Layout.PACKED
    """packed (samples end to end, cu_seqlens) or padded (to the longest of the micro-batch)"""
    sync: Sync = Sync.MICRO_STEP
    """where ranks wait for each other: micro-step (FSDP, ZeRO-3) or step (DDP with no_sync)"""
    rank_tokens: Advanced[Positive | None] = None
    """most tokens of a step on one DP rank, as they are padded; the step is smaller where need be;
    what exceeds it by itself has a rank to itself, and a step that is planned again goes whole"""
    pipeline_stages: Positive = 1
    """pipeline stages of a model replica: a DP rank's largest micro-batch then counts once more for
    each stage beyond the first, as every stage waits for it while the pipeline fills and drains"""
    micro_batch_order: Advanced[MicroBatchOrder | None] = None
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
    outlier_max_skips: Advanced[NotNegative | None] = None
    """the same for samples that cost more than the mean rank's share; unset: --max-skips"""
    max_step_variation: Variation = 0.25
    """how far a step's loss tokens may stray from the mean step's, as a share of these, so that
    under token-mean no sample weighs much less or more for its neighbours; more where arrivals
    stray as far by themselves; off: as far as balance has it"""
    planning_budget: Advanced[DurationOrNothing] = 0.005
    """what a split may spend to wait less, on one core: trades between micro-batches, further ways
    to share whole groups out, padded runs cut anew; counted in operations, not timed, so that plans
    do not depend on the machine; 0s tries none of these"""


class _StepsAndWindow(StepOptions):
    """How large steps are, and which samples wait for one."""

    dp_size: Positive
    """DP ranks of the first process group, which is refused if it has another number; all must be
    there before training starts"""
    elastic: Advanced[bool] = True
    """let later process groups bring another number of DP ranks; open steps are planned again for
    them with the same samples, and --dispatch-batch-size stays"""
    dispatch_batch_size: Positive | None = None
    """samples in one step over all DP ranks, gradient accumulation included; this or
    --dispatch-batch-groups"""
    dispatch_batch_groups: Positive | None = None
    """groups in one step over all DP ranks, whatever their sizes; a sample without a group counts
    as one"""
    window_multiple: Multiple = 1.5
    """samples to choose a step from, in dispatch batches; 1 means no choice, 1.25 has most of the
    gain and 1.5 nearly all, beyond 2 is rarely worth the delay"""
    buffer_capacity: Positive | None = None
    """ready samples (or groups, as the batch is counted) at which producers must wait, at least the
    window; members of groups under way never wait for it; unset: the window"""
    buffer_tokens: Advanced[Positive | None] = None
    """tokens of ready samples at which producers must wait; unset: no cap on tokens"""
    buffer_bytes: Size | None = None
    """payload bytes in memory, of ready samples and of groups under way; nothing exceeds it; unset:
    a quarter of the memory of the machine or control group"""
    held_bytes: Advanced[Size | None] = None
    """payload bytes of pushes that wait; what comes beyond is let go, and asked for again when its
    turn comes; unset: a sixteenth of the memory"""
    receive_bytes: Advanced[Size | None] = None
    """bytes of frames and request bodies that are being received, over all connections; beyond it
    producers wait in turn, HTTP is answered 503, and what comes at less than 1 MiB/s over a
    request-timeout is given up; unset: a sixteenth of the machine's or cgroup's memory, at least
    max-frame-bytes and max-body-bytes"""
    fields: Annotated[tuple[DeclaredField, ...], BeforeValidator(split_commas)] = ()
    """what every sample has, as name:dtype, name:dtype:per-sample, name:dtype:ragged or name:str,
    repeatable or with commas; others are refused; unset: as in the first accepted push"""
    allow_non_finite: Advanced[bool] = False
    """take NaN and infinities over HTTP; rollout workers say `allow_non_finite=True`"""


class ServeOptions(SelectionOptions, _StepsAndWindow):  # pydantic has the last base's fields first
    """Everything that `dispatcher serve` can be told; `ServeConfig.HEADINGS` says the themes."""

    strategy: Strategy = Strategy.WINDOW
    """how a step is chosen and split: window, or for comparison round-robin, greedy, kk"""
    groups: Grouping = Grouping.STEP
    """what stays together of a group: ignore (nothing), step (one step), rank (one DP rank),
    micro-batch (one micro-batch)"""
    group_size: Positive | None = None
    """samples of one prompt; unset: each push says"""
    incomplete_groups: Advanced[IncompleteGroups] = IncompleteGroups.DROP
    """a group that will never be whole: drop it, or keep (train on the members that came)"""
    oversize: Oversize = Oversize.ERROR
    """a sample longer than --micro-batch-tokens: error (refuse it), alone (give it a micro-batch
    of its own), drop (accept, count and discard it)"""
    target_excess: Ratio = 0.01
    """dispatch before the window is full once the plan wastes no more trainer time than this"""
    max_wait: Duration = 2.0
    """once a rank has waited for so long, dispatch a whole batch if one is ready, whatever the
    window and the plan; less than a batch goes where --buffer-bytes is full, or at the end of a
    phase or of the stream"""
    max_open_steps: Annotated[int, Field(ge=1, le=MAX_OPEN_STEPS)] = 4
    """steps that may be planned but not committed; at most 1024"""
    max_staleness: NotNegative | None = None
    """policy versions that a sample may lag behind the trainer's, and samples have to say theirs
    unless they are pushed as exempt; unset: any"""
    staleness_policy: Advanced[StalenessPolicy] = StalenessPolicy.DROP
    """a sample that would be too stale: drop it, or prefer-oldest (train on it before newer)"""
    steps_per_version: Positive = 1
    """optimizer steps that the trainer takes with samples of one policy version"""
    group_timeout: Advanced[Duration] = 600.0
    """give a group up when nothing has come of it for so long and none of its producers is there
    any more; while one is, its rollouts may take their time"""
    producer_timeout: Advanced[Duration] = 60.0
    """a producer that left without a goodbye counts as gone after this: groups, and the end of a
    phase or of the stream, wait for it no longer"""
    last_batch: Advanced[LastBatch] = LastBatch.FLUSH
    """the partial batch at the end of the stream: flush (a smaller step) or drop"""
    listen: Annotated[tuple[Address, ...], BeforeValidator(one_or_several), Field(min_length=1)] = (
        Endpoint("127.0.0.1", 7077),
    )
    """sample plane: host:port or unix:/path, repeatable; port 0 takes any free one"""
    http: Address = HTTP_PLANE
    """HTTP plane (metrics, health, POST /v1/samples): host:port or unix:/path"""
    ready_file: Path | None = None
    """write the addresses in use and the run's id to this file, as JSON, once serving"""
    token_file: Path | None = None
    """a file with the secret that clients must show, on both planes; it or --tls-client-ca is
    needed to listen on addresses that other machines reach"""
    producer_token_file: Path | None = None
    """a file with another secret, for rollout workers: who shows it may push, close groups and end
    its own phases and stream, and nothing else; needs --token-file"""
    tls_cert: Path | None = None
    """serve TLS on TCP addresses of both planes with this certificate (PEM, with its chain)"""
    tls_key: Path | None = None
    """its private key (PEM, not encrypted)"""
    tls_client_ca: Path | None = None
    """clients must show a certificate signed by one of these authorities (PEM)"""
    insecure: bool = False
    """listen on addresses that other machines reach with neither token nor client certificates"""
    journal_dir: Path | None = None
    """keep accepted samples and open steps in this directory, so that a restart goes on with them;
    unset: a restart begins with nothing"""
    journal_sync: JournalSync = "batch"
    """when a push is acknowledged: batch (once synced to the disk), interval:100ms (once written,
    synced so often), off (once written)"""
    retain: Retain | None = None
    """when a step's samples are freed: commit (once it is committed), checkpoint (once a trainer's
    checkpoint that covers it is saved; needs --journal-dir; takes disk, not the buffer's room);
    unset: checkpoint with a journal, commit without"""
    retain_bytes: Advanced[Size | None] = None
    """payload bytes of committed steps that are kept until a checkpoint covers them; beyond it the
    oldest go; unset: a tenth of the volume of --journal-dir, and at most 50GiB; never more than
    half of what the volume has for the journal"""
    payload_stores: Annotated[
        tuple[StoreAddress, ...], BeforeValidator(split_commas), Field(max_length=16)
    ] = ()
    """payload stores that references may be into, file:///mnt/rollouts, say, repeatable or with
    commas; rollout workers and DP ranks open no others, and the first that a producer can open is
    where it puts what is large; who pushes over HTTP puts what it likes itself, and pushes
    references; needs --journal-dir; unset: every payload comes through the dispatcher"""
    inline_limit: Advanced[SizeOrNothing] = 2**20
    """producers put payloads of so many bytes and more into the payload store, each for itself, and
    push smaller ones; 0B: all of them"""
    prefetch_bytes: Advanced[Size] = 2**31
    """what a DP rank fetches from payload stores for steps that it has not begun; the step that its
    training loop waits for is fetched whole, however large it is"""
    referenced_bytes: Advanced[Size | None] = None
    """payload bytes in payload stores, of ready samples and of groups under way; producers wait
    beyond it; those of open steps come on top; unset: sixteen times --buffer-bytes"""
    max_sample_tokens: Advanced[Annotated[int, Field(ge=1, lt=2**31)]] = 2**20
    """refuse longer samples"""
    max_frame_bytes: Advanced[Size] = 256 * 2**20
    """refuse larger frames"""
    max_body_bytes: Advanced[Size] = 4 * 2**20
    """refuse larger HTTP request bodies, as sent and once decompressed; cut what is more into
    several requests"""
    max_waiting_bodies: Fixed[Positive] = 64
    """HTTP request bodies that may wait to be read, one after the other; more are answered 503"""
    producer_credits: Advanced[Positive] = 8
    """pushes that a producer may have unanswered"""
    max_connections: Advanced[Positive] = 4096
    """connections at a time on each plane, as far as the limit on open files allows; on the HTTP
    plane those that rest make room"""
    max_pending_connections: Fixed[Positive] = 512
    """connections on each plane beside these that have not introduced themselves, or made their
    first request; beyond it others wait to be accepted, and the oldest make room for them"""
    handshake_timeout: Fixed[Duration] = 10.0
    """close a connection that has not introduced itself, or made its first request, by then"""
    request_timeout: Advanced[Duration] = 60.0
    """an HTTP request has to arrive whole within this time; a frame has this long before its pace
    counts, see receive-bytes"""
    write_timeout: Fixed[Duration] = 60.0
    """close a connection whose peer stops reading for so long"""
    idle_timeout: Advanced[Duration] = 300.0
    """close a producer's or HTTP connection that is silent, heartbeats included, for so long"""
    heartbeat_interval: Advanced[Duration] = 5.0
    """how often clients say that they are alive"""
    rank_timeout: Duration = 60.0
    """close a DP rank's connection that is silent, heartbeats included, for so long; its steps stay
    open, and it or its successor goes on with them; a rank without a connection for so long is
    lost, and the others get an error that names it when they ask for a further step"""
    drain_timeout: Advanced[Duration] = 25.0
    """after SIGTERM, wait for open steps to be committed for so long; less than the 30 s that pods
    have by default"""
    sample_id_horizon: Advanced[NotNegative] = 1_000_000
    """sample ids given by producers that are remembered to recognise repeats, and as many ids of
    groups that are complete or given up, to refuse late members"""
    record: Path | None = None
    """write what arrives, what is planned and how long it takes to files in this directory, for
    dispatcher simulate, report and trace; no payloads, no ids; see docs/record.md"""
    record_bytes: Advanced[Annotated[Size, Field(ge=2**20)]] = 2**30
    """most that the record may take on disk; the oldest of it is deleted"""
    per_rank_metrics: Advanced[bool] = True
    """export one series a DP rank; switch off for very many ranks"""
    progress_interval: Fixed[Duration | None] = 10.0
    """log a line on how the run gets on so often, if anything has changed; none: never"""
    log_level: LogLevel = LogLevel.INFO
    """least severe message to log"""
    log_format: LogFormat = LogFormat.AUTO
    """auto (text on a terminal, else JSON), json or text"""
