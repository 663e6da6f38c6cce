"""Where the dispatcher is reached, by whom, and what it keeps on disk."""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.service.config.themes.shared import Options
from rollout_dispatcher.service.config.types import (
    HTTP_PLANE,
    Address,
    JournalSync,
    Retain,
    StoreAddress,
    one_or_several,
    split_commas,
)
from rollout_dispatcher.service.config.units import Size, SizeOrNothing


class AddressOptions(Options):
    """Addresses."""

    listen: Annotated[tuple[Address, ...], BeforeValidator(one_or_several), Field(min_length=1)] = (
        Endpoint("127.0.0.1", 7077),
    )
    """sample plane: host:port or unix:/path, repeatable; port 0 takes any free one"""
    http: Address = HTTP_PLANE
    """HTTP plane (metrics, health, POST /v1/samples): host:port or unix:/path"""
    ready_file: Path | None = None
    """write the addresses in use and the run's id to this file, as JSON, once serving"""


class SecurityOptions(Options):
    """Security."""

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


class JournalOptions(Options):
    """The journal."""

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
    retain_bytes: Size | None = None
    """payload bytes of committed steps that are kept until a checkpoint covers them; beyond it the
    oldest go; unset: a tenth of the volume of --journal-dir, and at most 50GiB; never more than
    half of what the volume has for the journal"""


class StoreOptions(Options):
    """Payloads by reference."""

    payload_stores: Annotated[
        tuple[StoreAddress, ...], BeforeValidator(split_commas), Field(max_length=16)
    ] = ()
    """payload stores that references may be into, file:///mnt/rollouts, say, repeatable or with
    commas; rollout workers and DP ranks open no others, and the first that a producer can open is
    where it puts what is large; who pushes over HTTP puts what it likes itself, and pushes
    references; needs --journal-dir; unset: every payload comes through the dispatcher"""
    inline_limit: SizeOrNothing = 2**20
    """producers put payloads of so many bytes and more into the payload store, each for itself, and
    push smaller ones; 0B: all of them"""
    prefetch_bytes: Size = 2**31
    """what a DP rank fetches from payload stores for steps that it has not begun; the step that its
    training loop waits for is fetched whole, however large it is"""
    referenced_bytes: Size | None = None
    """payload bytes in payload stores, of ready samples and of groups under way; producers wait
    beyond it; those of open steps come on top; unset: sixteen times --buffer-bytes"""
