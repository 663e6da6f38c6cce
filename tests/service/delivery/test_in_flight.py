"""Descriptors on their way to a peer: counted until it has read what they came with."""

import asyncio
import os
import resource
import socket
from contextlib import suppress

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.service.connections.peer import Bulk, Peer
from rollout_dispatcher.service.delivery.in_flight import InFlight
from rollout_dispatcher.transport.plain import StreamTransport
from tests.service.connections.wires import LIMITS, make_hub
from tests.support.descriptors import a_descriptor

LIMIT = m.MAX_SEGMENTS + 8


async def turns(count: int = 20) -> None:
    """So many turns of the event loop, in which a socket that is ready is heard."""
    for _ in range(count):
        await asyncio.sleep(0)


async def read_all(peer: Peer, theirs: socket.socket) -> None:
    """Receive what the peer was sent."""
    while not peer.has_read_all:
        await asyncio.sleep(0)
        with suppress(BlockingIOError):
            theirs.recv(1 << 16)


async def test_what_is_read_makes_room() -> None:
    router = make_hub()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    peer = Peer(router, LIMITS, router.clock)
    StreamTransport(asyncio.get_running_loop(), ours, peer)
    in_flight = InFlight(LIMIT)
    with theirs:
        theirs.sendall(codec.encode(m.HelloProducer(client_id="p")))
        await turns()
        await read_all(peer, theirs)  # its welcome
        assert in_flight.left == m.MAX_SEGMENTS
        peer.send(m.Pong())
        in_flight.sent(peer, LIMIT - 3)
        assert in_flight.left == 3
        await asyncio.sleep(0)
        assert in_flight.left == 3  # it was written, and is not read
        await read_all(peer, theirs)
        assert in_flight.left == m.MAX_SEGMENTS


async def test_who_is_gone_has_nothing_on_its_way() -> None:
    router = make_hub()
    ours, theirs = socket.socketpair()
    peer = Peer(router, LIMITS, router.clock)
    StreamTransport(asyncio.get_running_loop(), ours, peer)
    in_flight = InFlight(LIMIT)
    in_flight.sent(peer, LIMIT)
    theirs.close()
    await turns()
    assert in_flight.left == m.MAX_SEGMENTS
    router.close()


async def test_where_no_descriptor_is_left_the_bytes_are_sent() -> None:
    router = make_hub()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    peer = Peer(router, LIMITS, router.clock)
    StreamTransport(asyncio.get_running_loop(), ours, peer)
    shared, carried = (m.Pushed(first_seq=seq, outcomes=[]) for seq in (1, 2))
    with theirs, a_descriptor() as descriptor:
        theirs.sendall(codec.encode(m.HelloProducer(client_id="p")))
        await turns()
        await read_all(peer, theirs)
        job = Bulk([codec.encode(shared)], [descriptor], lambda: Bulk([codec.encode(carried)]))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            peer.enqueue(lambda: job)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        peer.enqueue(lambda: job)
        await turns()
        data, came, _, _ = socket.recv_fds(theirs, 1 << 16, 8)
        for found in came:
            os.close(found)
        assert data == codec.encode(carried) + codec.encode(shared)
        assert len(came) == 1
    router.close()
