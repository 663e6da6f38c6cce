"""Descriptors over real Unix sockets: with the bytes that they belong to, to who has asked."""

import asyncio
import os
import socket
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from rollout_dispatcher.transport.descriptors.sockets import MAX_DESCRIPTORS
from rollout_dispatcher.transport.plain import (
    HIGH_WATER_DESCRIPTORS,
    DescriptorsLost,
    StreamProtocol,
    StreamTransport,
)
from tests.support.descriptors import a_descriptor, are_closed_again, open_descriptors


class Recorder(StreamProtocol):
    """Notes bytes and descriptors in the order in which they come; a descriptor as its file's."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(65536))
        self.heard: list[bytes | list[int]] = []
        self.lost = asyncio.get_running_loop().create_future()
        self.changed = asyncio.Event()
        self.paused = False

    def get_buffers(self) -> list[memoryview]:
        return [self._memory]

    def buffer_updated(self, nbytes: int) -> None:
        self.heard.append(bytes(self._memory[:nbytes]))
        self.changed.set()

    def descriptors_received(self, descriptors: Sequence[int]) -> None:
        self.heard.append([file_of(one) for one in descriptors])
        assert not any(map(os.get_inheritable, descriptors))
        super().descriptors_received(descriptors)

    def pause_writing(self) -> None:
        self.paused = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)

    async def until_heard(self, nbytes: int) -> None:
        while sum(len(part) for part in self.heard if isinstance(part, bytes)) < nbytes:
            self.changed.clear()
            await self.changed.wait()


def file_of(descriptor: int) -> int:
    return os.fstat(descriptor).st_ino


@asynccontextmanager
async def both_ends() -> AsyncIterator[tuple[StreamTransport, StreamTransport, Recorder]]:
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    sender, receiver = Recorder(), Recorder()
    transports = StreamTransport(loop, ours, sender), StreamTransport(loop, theirs, receiver)
    yield *transports, receiver
    for transport in transports:
        transport.abort()
    await asyncio.wait((sender.lost, receiver.lost))


@pytest.mark.asyncio
async def test_descriptors_come_with_their_first_byte_between_what_was_written_around() -> None:
    files = [os.memfd_create("test") for _ in range(4)]
    inodes = list(map(file_of, files))
    async with both_ends() as (sender, receiving, heard):
        receiving.take_descriptors(8)
        sender.write(b"before ")
        sender.writelines([b"first ", b"of two "], files[:3])
        sender.writelines([b"second "], files[3:])
        sender.write(b"after")
        for one in files:  # they stay the caller's
            os.close(one)
        await heard.until_heard(len(b"before first of two second after"))
    parts = heard.heard
    assert [part for part in parts if isinstance(part, list)] == [inodes[:3], inodes[3:]]
    at = parts.index(inodes[3:])
    assert b"".join(part for part in parts[:at] if isinstance(part, bytes)).endswith(b"of two ")


@pytest.mark.asyncio
async def test_who_has_not_asked_gets_none_and_ends_the_connection() -> None:
    before = open_descriptors()
    async with both_ends() as (sender, _, heard):
        with a_descriptor() as one:
            sender.writelines([b"here"], [one])
        assert isinstance(await heard.lost, DescriptorsLost)
    assert are_closed_again(before)


@pytest.mark.asyncio
async def test_more_than_were_asked_for_are_closed_and_end_the_connection() -> None:
    before = open_descriptors()
    async with both_ends() as (sender, receiving, heard):
        receiving.take_descriptors(2)
        with a_descriptor() as one:
            sender.writelines([b"here"], [one] * 9)
        assert isinstance(await heard.lost, DescriptorsLost)
        assert not heard.heard
    assert are_closed_again(before)


@pytest.mark.asyncio
async def test_what_a_peer_does_not_read_is_bounded_and_closed_with_the_connection() -> None:
    before = open_descriptors()
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    recorder = Recorder()
    with theirs, a_descriptor() as one:
        transport = StreamTransport(loop, ours, recorder)
        transport.write(bytes(4 << 20))
        transport.writelines([b"x"], [one] * (HIGH_WATER_DESCRIPTORS + 1))
        assert recorder.paused
        transport.abort()
        await recorder.lost
    assert are_closed_again(before)


@pytest.mark.asyncio
async def test_as_many_as_the_kernel_takes_go_at_a_time() -> None:
    async with both_ends() as (sender, receiving, heard):
        receiving.take_descriptors(MAX_DESCRIPTORS)
        with a_descriptor() as one:
            sender.writelines([b"x"], [one] * MAX_DESCRIPTORS)
        await heard.until_heard(1)
        assert [len(part) for part in heard.heard] == [MAX_DESCRIPTORS, 1]


@pytest.mark.asyncio
async def test_a_foreign_sender_may_give_those_of_several_writes_at_once() -> None:
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    recorder = Recorder()
    transport = StreamTransport(loop, ours, recorder)
    transport.take_descriptors(2)
    with theirs, a_descriptor() as one:
        rights = array("i", [one] * 2)
        theirs.sendmsg([b"one", b"two"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        await recorder.until_heard(6)
        assert [len(part) for part in recorder.heard] == [2, 6]
    transport.abort()
    await recorder.lost
