"""What is refused, how long is waited, and what is shown."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from rollout_dispatcher.service.config.themes.shared import Options
from rollout_dispatcher.service.config.types import LogFormat, LogLevel, NotNegative, Positive
from rollout_dispatcher.service.config.units import Duration, Size


class LimitOptions(Options):
    """Limits and deadlines."""

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
    open, and it or its successor goes on with them; a rank without a connection for so long is
    lost, and the others get an error that names it when they ask for a further step"""
    drain_timeout: Duration = 25.0
    """after SIGTERM, wait for open steps to be committed for so long; less than the 30 s that pods
    have by default"""
    sample_id_horizon: NotNegative = 1_000_000
    """sample ids given by producers that are remembered to recognise repeats, and as many ids of
    groups that are complete or given up, to refuse late members"""


class ObservabilityOptions(Options):
    """Observability."""

    record: Path | None = None
    """write what arrives, what is planned and how long it takes to files in this directory, for
    dispatcher simulate, report and trace; no payloads, no ids; see docs/record.md"""
    record_bytes: Annotated[Size, Field(ge=2**20)] = 2**30
    """most that the record may take on disk; the oldest of it is deleted"""
    per_rank_metrics: bool = True
    """export one series a DP rank; switch off for very many ranks"""
    progress_interval: Duration | None = 10.0
    """log a line on how the run gets on so often, if anything has changed; none: never"""
    log_level: LogLevel = LogLevel.INFO
    """least severe message to log"""
    log_format: LogFormat = LogFormat.AUTO
    """auto (text on a terminal, else JSON), json or text"""
