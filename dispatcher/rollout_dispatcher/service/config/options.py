"""What `dispatcher serve` can be told: each option declared once, here.

A field is a flag (`--window-multiple`), an environment variable (`DISPATCHER_WINDOW_MULTIPLE`),
a TOML key (`window_multiple`) and, by the docstring under it, a line of help. A `ServeConfig`
that exists is one that can be served: settings that contradict each other raise ConfigError
with cause and remedy when it is built.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rollout_dispatcher.balance.cost.models import parse_cost
from rollout_dispatcher.balance.planner import validate_config
from rollout_dispatcher.core.buffer.freshness import StalenessPolicy
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.plan import (
    Grouping,
    Layout,
    MicroBatchOrder,
    Oversize,
    PlanConfig,
    Strategy,
    Sync,
    longest_in_budget,
)
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.sample import Schema
from rollout_dispatcher.service.access import Access, open_access
from rollout_dispatcher.service.config.fields import DeclaredField, schema_of, split_fields
from rollout_dispatcher.service.config.memory_size import machine_memory
from rollout_dispatcher.service.config.types import (
    HTTP_PLANE,
    Address,
    IncompleteGroups,
    JournalSync,
    LastBatch,
    LogFormat,
    LogLevel,
    NotNegative,
    Positive,
    Retain,
)
from rollout_dispatcher.service.config.units import Duration, Size
from rollout_dispatcher.service.connections.descriptors import ConnectionLimits

#: Shares of the memory that there is, by default: what is buffered; what waits to be, and what is
#: being received.
BUFFER_SHARE, HELD_SHARE = 4, 16


class ServeConfig(BaseModel):
    """The settings of one running dispatcher."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )
    #: Headings of the help, each at the first option under it.
    HEADINGS: ClassVar[dict[str, str]] = {
        "dp_size": "steps",
        "window_multiple": "window and buffer",
        "fields": "samples",
        "strategy": "planning",
        "target_excess": "when to dispatch",
        "max_staleness": "freshness, groups and the end of the stream",
        "listen": "addresses",
        "token_file": "security",
        "journal_dir": "journal",
        "max_sample_tokens": "limits and deadlines",
        "per_rank_metrics": "observability",
    }

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

    window_multiple: Annotated[float, Field(ge=1, le=64, allow_inf_nan=False)] = 1.5
    """samples to choose a step from, in dispatch batches; 1 means no choice, 1.25 is most of the
    gain, beyond 4 is rarely worth the delay"""
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

    fields: Annotated[tuple[DeclaredField, ...], BeforeValidator(split_fields)] = ()
    """what every sample has, as name:dtype, name:dtype:per-sample, name:dtype:ragged or name:str,
    repeatable or with commas; others are refused; unset: what the samples of the first step have"""
    allow_non_finite: bool = False
    """take NaN and infinities over HTTP; rollout workers' arrays are not looked at"""

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
    cost: str = "quadratic:1,24576,0"
    """work of a sample of s tokens: tokens, quadratic:a,b,d for a*s*s + b*s + d, or hf:PATH for a
    Hugging Face config.json"""
    max_skips: NotNegative | None = None
    """dispatches that may pass a sample over; unset: 4 windows' worth, at least 6"""
    outlier_max_skips: NotNegative | None = None
    """the same for samples that cost more than the mean rank's share; unset: --max-skips"""
    outlier_lane: bool = True
    """let the heaviest samples wait for each other and leave together, within these bounds"""
    planning_budget: Duration = 0.005
    """what a plan that wastes more than 1 % may spend on comparing other selections and splits, on
    one core; counted in operations, not timed, so that plans do not depend on the machine"""

    target_excess: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    """dispatch before the window is full once the plan wastes no more trainer time than this"""
    max_wait: Duration = 2.0
    """once a rank has waited for so long, dispatch a whole batch if one is ready, whatever the
    window and the plan; less than a batch goes where --buffer-bytes is full, or at the end of a
    phase or of the stream"""
    max_open_steps: Positive = 4
    """steps that may be planned but not committed"""

    max_staleness: NotNegative | None = None
    """policy versions that a sample may lag behind the trainer's; unset: any"""
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

    listen: Annotated[tuple[Address, ...], Field(min_length=1)] = (Endpoint("127.0.0.1", 7077),)
    """sample plane: host:port or unix:/path, repeatable; port 0 takes any free one"""
    http: Address = HTTP_PLANE
    """HTTP plane (metrics, health, POST /v1/samples): host:port or unix:/path"""
    ready_file: Path | None = None
    """write the addresses in use and the run's id to this file, as JSON, once serving"""

    token_file: Path | None = None
    """a file with the secret that clients must show, on both planes; it or --tls-client-ca is
    needed to listen on addresses that other machines reach"""
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

    retain: Retain = Retain.COMMIT
    """when a step's samples are freed: commit (once it is committed), checkpoint (once a trainer's
    checkpoint that covers it is saved; needs --journal-dir; takes disk, not the buffer's room)"""

    max_sample_tokens: Annotated[int, Field(ge=1, lt=2**31)] = 2**20
    """refuse longer samples"""
    max_frame_bytes: Size = 256 * 2**20
    """refuse larger frames"""
    max_body_bytes: Size = 4 * 2**20
    """refuse larger HTTP request bodies, as sent and once decompressed; cut what is more into
    several requests"""
    max_waiting_bodies: Positive = 64
    """HTTP request bodies that may wait to be read, one after the other; more are answered 503"""
    producer_credits: Positive = 8
    """pushes that a producer may have unanswered"""
    max_connections: Positive = 4096
    """connections at a time on each plane, as far as the limit on open files allows; on the HTTP
    plane those that rest make room"""
    max_pending_connections: Positive = 512
    """connections on each plane beside these that have not introduced themselves, or made their
    first request; beyond it others wait to be accepted, and the oldest make room for them"""
    handshake_timeout: Duration = 10.0
    """close a connection that has not introduced itself, or made its first request, by then"""
    request_timeout: Duration = 60.0
    """an HTTP request has to arrive whole within this time; a frame has this long before its pace
    counts, see --receive-bytes"""
    write_timeout: Duration = 60.0
    """close a connection whose peer stops reading for so long"""
    idle_timeout: Duration = 300.0
    """close a producer's or HTTP connection that is silent, heartbeats included, for so long"""
    heartbeat_interval: Duration = 5.0
    """how often clients say that they are alive"""
    rank_timeout: Duration = 60.0
    """close a DP rank's connection that is silent, heartbeats included, for so long; its steps stay
    open, and it or its successor goes on with them"""
    drain_timeout: Duration = 60.0
    """after SIGTERM, wait for open steps to be committed for so long"""
    sample_id_horizon: NotNegative = 1_000_000
    """sample ids given by producers that are remembered to recognise repeats"""

    per_rank_metrics: bool = True
    """export one series a DP rank; switch off for very many ranks"""
    progress_interval: Duration | None = 10.0
    """log a line on how the run gets on so often, if anything has changed; none: never"""
    log_level: LogLevel = LogLevel.INFO
    """least severe message to log"""
    log_format: LogFormat = LogFormat.AUTO
    """auto (text on a terminal, else JSON), json or text"""

    @property
    def batch(self) -> int:
        """Samples in one step, or groups if `by_groups`."""
        return self.dispatch_batch_size or self.dispatch_batch_groups or 0

    @property
    def by_groups(self) -> bool:
        """Whether batch, window and capacity count groups."""
        return self.dispatch_batch_groups is not None

    @property
    def window_samples(self) -> int:
        """Samples (or groups) in the window, floor(W * B), in decimals: 1.15 * 100 is 115."""
        return math.floor(Fraction(str(self.window_multiple)) * self.batch)

    @property
    def buffer_samples(self) -> int:
        """The cap of the buffer in samples (or groups)."""
        return self.window_samples if self.buffer_capacity is None else self.buffer_capacity

    @property
    def buffer_memory(self) -> int:
        """Bytes that payloads of buffered samples may take."""
        share = machine_memory() // BUFFER_SHARE
        return share if self.buffer_bytes is None else self.buffer_bytes

    @property
    def held_memory(self) -> int:
        """Bytes that payloads of held pushes may take."""
        share = machine_memory() // HELD_SHARE
        return share if self.held_bytes is None else self.held_bytes

    @property
    def received_bytes(self) -> int:
        """`receive_bytes`, or its default."""
        default = max(self.max_frame_bytes, self.max_body_bytes, machine_memory() // HELD_SHARE)
        return default if self.receive_bytes is None else self.receive_bytes

    @property
    def connection_limits(self) -> ConnectionLimits:
        """Connections that are asked for, whether descriptors allow them or not."""
        most = self.max_connections
        return ConnectionLimits(most, most, self.max_pending_connections)

    @property
    def longest_in_budget(self) -> int | None:
        """Tokens of the longest sample that fits the budget once padded; None without a budget."""
        return longest_in_budget(self.micro_batch_tokens, self.sample_length_multiple)

    @property
    def order_in_step(self) -> MicroBatchOrder:
        """`micro_batch_order`, or its default."""
        pipeline = self.pipeline_stages > 1
        default = MicroBatchOrder.ENDS_SMALL if pipeline else MicroBatchOrder.PEAK_FIRST
        return self.micro_batch_order or default

    @property
    def skips_bound(self) -> int:
        """`max_skips`, or its default: four windows of dispatches, and six at the least."""
        default = max(6, math.ceil(4 * self.window_multiple))
        return default if self.max_skips is None else self.max_skips

    def plan_config(self) -> PlanConfig:
        """What the planner needs to know. Raises ConfigError if the cost cannot be read."""
        return PlanConfig(
            dp_size=self.dp_size,
            dispatch_batch_size=self.batch * ((self.group_size or 1) if self.by_groups else 1),
            by_groups=self.by_groups,
            cost=parse_cost(self.cost, _read),
            micro_batch_size=self.micro_batch_size,
            micro_batch_tokens=self.micro_batch_tokens,
            layout=self.layout,
            sync=self.sync,
            strategy=self.strategy,
            grouping=self.groups,
            oversize=self.oversize,
            micro_batch_multiple=self.micro_batch_multiple,
            min_micro_batches=self.min_micro_batches,
            sample_length_multiple=self.sample_length_multiple,
            rank_tokens=self.rank_tokens,
            pipeline_stages=self.pipeline_stages,
            micro_batch_order=self.order_in_step,
            max_skips=self.skips_bound,
            outlier_max_skips=self.outlier_max_skips,
            outlier_lane=self.outlier_lane,
            planning_budget=self.planning_budget,
        )

    def access(self) -> Access:
        """What clients must show; reads the files. Raises ConfigError if one cannot be used."""
        return open_access(
            [*self.listen, self.http],
            token_file=self.token_file,
            certificate=self.tls_cert,
            key=self.tls_key,
            client_ca=self.tls_client_ca,
            insecure=self.insecure,
        )

    def check_size(self) -> Callable[[int], None]:
        """What raises ConfigError for a number of DP ranks that no step can be planned for."""
        plan_config = self.plan_config()

        def check(dp_size: int) -> None:
            if dp_size > self.max_connections:
                raise ConfigError(
                    f"they would need as many connections, and --max-connections is "
                    f"{self.max_connections}; raise it"
                )
            validate_config(replace(plan_config, dp_size=dp_size), self.window_multiple)

        return check

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_batch()
        self._check_fields()
        validate_config(self.plan_config(), self.window_multiple)
        self._check_buffer()
        self._check_deadlines()
        self._check_retain()
        self.access()
        return self

    def _check_retain(self) -> None:
        if self.retain is Retain.CHECKPOINT and self.journal_dir is None:
            raise ConfigError(
                "--retain checkpoint keeps the samples of committed steps in the journal; set "
                "--journal-dir, or take --retain commit"
            )

    def _check_batch(self) -> None:
        sizes = (self.dispatch_batch_size, self.dispatch_batch_groups)
        if sizes.count(None) != 1:
            found = "neither is" if sizes.count(None) == 2 else "both are"
            raise ConfigError(
                f"a step has a number of samples or of groups, and {found} set; set exactly one "
                "of --dispatch-batch-size and --dispatch-batch-groups"
            )
        if self.by_groups and self.groups is Grouping.IGNORE:
            raise ConfigError(
                "--dispatch-batch-groups counts groups, and --groups ignore knows none; set "
                "--dispatch-batch-size, or --groups step"
            )

    def _check_fields(self) -> None:
        try:
            schema_of(self.fields)
        except ValueError as error:
            raise ConfigError(f"--fields: {error}") from None

    @property
    def declared_schema(self) -> Schema | None:
        """What every sample has, if that is declared."""
        return schema_of(self.fields)

    def _check_buffer(self) -> None:
        window = self.window_samples
        if self.buffer_samples < window:
            raise ConfigError(
                f"--buffer-capacity {self.buffer_capacity} is smaller than the window of {window} "
                f"samples, which could never fill; raise it to {window} or lower --window-multiple"
            )
        batch, size, m = self.batch, self.group_size, self.micro_batch_size
        if self.groups is Grouping.MICRO_BATCH and m is not None and (size or 1) > m:
            raise ConfigError(
                f"--groups micro-batch keeps the {size} samples of a group in one micro-batch, and "
                f"--micro-batch-size is {m}; raise it to {size} or more, or set --groups rank"
            )
        if size is None or self.by_groups or self.groups is Grouping.IGNORE or batch % size == 0:
            return
        below, above = batch // size * size, -(-batch // size) * size
        raise ConfigError(
            f"groups of {size} samples stay whole, so they never fill a dispatch batch of {batch}; "
            f"set --dispatch-batch-size {f'{below} or {above}' if below else above}, or "
            "--groups ignore"
        )

    def _check_deadlines(self) -> None:
        for name in ("rank_timeout", "idle_timeout"):
            if getattr(self, name) <= 2 * self.heartbeat_interval:
                raise ConfigError(
                    f"--{name.replace('_', '-')} must exceed two heartbeats, or one late one "
                    "ends a healthy connection; raise it or lower --heartbeat-interval"
                )


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")
