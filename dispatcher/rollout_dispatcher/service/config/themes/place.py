"""Where the dispatcher is reached, by whom, and what it keeps on disk."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.service.config.themes.shared import Options
from rollout_dispatcher.service.config.types import (
    HTTP_PLANE,
    Address,
    JournalSync,
    Retain,
    SharedMemoryUse,
)


class AddressOptions(Options):
    """Addresses."""

    listen: Annotated[tuple[Address, ...], Field(min_length=1)] = (Endpoint("127.0.0.1", 7077),)
    """sample plane: host:port or unix:/path, repeatable; port 0 takes any free one"""
    http: Address = HTTP_PLANE
    """HTTP plane (metrics, health, POST /v1/samples): host:port or unix:/path"""
    shared_memory: SharedMemoryUse = SharedMemoryUse.AUTO
    """auto: who connects over a Unix socket passes large payloads on as shared memory, as far as a
    quarter of the open files that are allowed goes; off: bytes are sent"""
    ready_file: Path | None = None
    """write the addresses in use and the run's id to this file, as JSON, once serving"""


class SecurityOptions(Options):
    """Security."""

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


class JournalOptions(Options):
    """The journal."""

    journal_dir: Path | None = None
    """keep accepted samples and open steps in this directory, so that a restart goes on with them;
    unset: a restart begins with nothing"""
    journal_sync: JournalSync = "batch"
    """when a push is acknowledged: batch (once synced to the disk), interval:100ms (once written,
    synced so often), off (once written)"""
    retain: Retain = Retain.COMMIT
    """when a step's samples are freed: commit (once it is committed), checkpoint (once a trainer's
    checkpoint that covers it is saved; needs --journal-dir; takes disk, not the buffer's room)"""
