"""Peers that nobody asked for: each says something, hears what it is told, and leaves."""

import socket
from contextlib import suppress

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from tests.chaos.cluster.cluster import Cluster

#: How long a stranger listens at most.
PATIENCE_S = 5.0


def stranger(cluster: Cluster, said: bytes) -> bytes:
    """Say this on a connection of its own; returns what is heard until that is over."""
    heard = b""
    with socket.create_connection(cluster.listen, PATIENCE_S) as sock, suppress(OSError):
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        while part := sock.recv(65_536):
            heard += part
    return heard


def impersonate(cluster: Cluster, dp_rank: int) -> bytes:
    """Claim the place of a rank that is there; returns what is heard."""
    cluster.group.look()
    hello = m.HelloRank(
        client_id="stranger",
        dp_rank=dp_rank,
        dp_size=cluster.size,
        generation=cluster.group.seen[dp_rank].generation,
    )
    return stranger(cluster, codec.encode(hello))
