"""Who is compared: wheels that `make bench-peers` unpacks, and clones that a user names."""

from collections.abc import Callable
from pathlib import Path

from tests.peers.adapters import (
    areal,
    nemo_rl,
    openrlhf,
    prime_rl,
    skyrl,
    slime,
    textbook,
    transfer_queue,
    transformers,
    verl,
)
from tests.peers.loading import UNPACKED
from tests.peers.problem import Peer

Adapter = Callable[[Path], Peer | None]

#: Where clones are looked for.
SOURCES = Path("build/bench/sources")
FROM_INDEX: tuple[Adapter, ...] = (verl.peer, transformers.peer, transfer_queue.peer)
#: Folder of a clone, as `git clone` calls it -> its adapter.
FROM_SOURCES: dict[str, Adapter] = {
    "slime": slime.peer,
    "miles": slime.miles,
    "AReaL": areal.peer,
    "RL": nemo_rl.peer,
    "SkyRL": skyrl.peer,
    "OpenRLHF": openrlhf.peer,
    "prime-rl": prime_rl.peer,
}


def from_index(folder: Path = UNPACKED) -> list[Peer]:
    """Peers of the package index that are unpacked there."""
    found = [load(folder) for load in FROM_INDEX]
    return [peer for peer in found if peer is not None]


def from_sources(folder: Path = SOURCES) -> list[Peer]:
    """Peers that were cloned into this folder, each under its repository's name."""
    found = [load(folder / name) for name, load in FROM_SOURCES.items()]
    return [peer for peer in found if peer is not None]


def all_peers(sources: Path = SOURCES) -> list[Peer]:
    """Everyone at hand."""
    return [*from_index(), *from_sources(sources), *textbook.peers()]
