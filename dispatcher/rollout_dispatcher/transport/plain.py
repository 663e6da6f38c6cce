"""A plain stream socket as an asyncio transport that neither joins nor copies its buffers.

asyncio's own receives into one buffer at a time and joins the buffers of a write; here a protocol
offers many buffers (`get_buffers`), and gathered writes are sent without a copy. Writes of one
iteration of the event loop are sent together. Invariants: bytes are sent in the order in which they
were written; `connection_lost` is called once, as the last call; for a peer that does not read, the
transport refers to the bytes written before `pause_writing`, and copies none.
"""

import asyncio
import socket
from collections.abc import Iterable

from rollout_dispatcher.protocol.outbox import Buffer, Outbox
from rollout_dispatcher.transport.turns import Turns, turns_of

#: Bytes from which on to write at once, rather than at the end of the iteration: each write wakes
#: the peer, so a few micro-batches are sent together.
WRITE_AT_ONCE_BYTES = 512 * 1024
#: Bytes written before others get their turn, to a peer that reads as fast as they are written.
WRITE_BYTES = 2 * 1024 * 1024
#: The protocol is paused while more than this is unsent, and resumed once it is all sent.
HIGH_WATER_BYTES = 64 * 1024


class StreamProtocol(asyncio.BufferedProtocol):
    """asyncio's BufferedProtocol that offers several buffers at a time.

    reads_at_once: number of reads, while there is more, before others get their turn.
    readable_since: earliest time at which the bytes received now may have arrived, by the event
    loop's clock.
    """

    reads_at_once = 1
    readable_since: float | None = None

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  asyncio's signature
        """The first of `get_buffers`, for asyncio's own transports."""
        return self.get_buffers()[0]

    def get_buffers(self) -> list[memoryview]:
        """Memory for the next bytes, in order; no piece empty, at most IOV_MAX pieces."""
        raise NotImplementedError


class StreamTransport(asyncio.Transport):
    """Owns a connected socket of a running event loop; reads from the start."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, protocol: StreamProtocol
    ) -> None:
        super().__init__({"socket": sock})
        sock.setblocking(False)
        self._loop, self._sock, self._protocol = loop, sock, protocol
        self._turns, self._descriptor = turns_of(loop), sock.fileno()
        self._outbox = Outbox()
        self._reading = self._writing = self._scheduled = False
        self._paused = self._closing = self._ends = self._lost = False
        protocol.connection_made(self)
        self.resume_reading()

    # -- reading ----------------------------------------------------------------------------

    def pause_reading(self) -> None:
        """Receive nothing until `resume_reading`."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock)

    def resume_reading(self) -> None:
        """Receive again."""
        if not self._reading and not self._closing:
            self._reading = True
            if self._turns is None:
                self._loop.add_reader(self._sock, self._read)
            else:
                self._loop.add_reader(self._sock, self._read_in_turn, self._turns)

    def _read_in_turn(self, turns: Turns) -> None:
        since = turns.serve(self._descriptor)
        if since is None:
            return
        began, self._protocol.readable_since = self._loop.time(), since
        self._read()
        turns.took(self._descriptor, self._loop.time() - began)

    def _read(self) -> None:
        for _ in range(self._protocol.reads_at_once):
            if not self._receive():
                break

    def _receive(self) -> bool:
        """Receive once; returns whether there may be more."""
        try:
            nbytes = self._sock.recvmsg_into(self._protocol.get_buffers())[0]
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._lose(error)
            return False
        except Exception as error:
            self._give_up(error)
            return False
        try:
            if nbytes:
                self._protocol.buffer_updated(nbytes)
            elif self._protocol.eof_received():
                self.pause_reading()
            else:
                self.close()
        except Exception as error:
            self._give_up(error)
        return self._reading

    # -- writing ----------------------------------------------------------------------------

    def write(self, data: Buffer) -> None:
        """Write one buffer; see `writelines`."""
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        """Write buffers in order; they must not change before they are sent."""
        if self._closing:
            return
        self._outbox.put(list_of_data)
        if self._writing:
            self._pause_above_high_water()
        elif self._outbox.nbytes >= WRITE_AT_ONCE_BYTES:
            self._write()
        elif not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._write)

    def get_write_buffer_size(self) -> int:
        """Bytes that are written and not sent."""
        return self._outbox.nbytes

    def copy_unsent(self) -> None:
        """Copy unsent bytes: the written buffers may change from now on."""
        self._outbox.copy()

    def can_write_eof(self) -> bool:
        """Stream sockets can."""
        return True

    def write_eof(self) -> None:
        """Send the end of the stream behind all written bytes."""
        self._ends = True
        self._write()

    def _write(self) -> None:
        """Send as much as the socket takes; then wait for room, or let the protocol write again."""
        self._scheduled = False
        try:
            left = WRITE_BYTES
            while self._outbox.nbytes and left > 0:
                sent = self._sock.sendmsg(self._outbox.head())
                self._outbox.sent(sent)
                left -= sent
            if self._outbox.nbytes:
                self._wait_for_room()
                return
        except (BlockingIOError, InterruptedError):
            self._wait_for_room()
            return
        except OSError as error:
            self._lose(error)
            return
        if self._writing:
            self._wait_no_more()
        if self._closing:
            self._lose(None)
        elif self._ends:
            self._end()
        elif self._paused:
            self._paused = False
            self._protocol.resume_writing()

    def _wait_for_room(self) -> None:
        if not self._writing:
            self._writing = True
            self._loop.add_writer(self._sock, self._write)
        self._pause_above_high_water()

    def _pause_above_high_water(self) -> None:
        if self._outbox.nbytes > HIGH_WATER_BYTES and not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def _wait_no_more(self) -> None:
        self._writing = False
        self._loop.remove_writer(self._sock)

    def _end(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._lose(error)

    # -- the end ----------------------------------------------------------------------------

    def is_closing(self) -> bool:
        """Whether it is closed, or closes once everything is sent."""
        return self._closing

    def close(self) -> None:
        """Close once everything is sent; nothing more is received or written."""
        if not self._closing:
            self._closing = True
            self.pause_reading()
            self._write()

    def abort(self) -> None:
        """Close at once."""
        self._lose(None)

    def _give_up(self, error: Exception) -> None:
        """The protocol has failed: end its connection, as asyncio's own transports do."""
        context = {"message": "a protocol has failed", "exception": error, "transport": self}
        self._loop.call_exception_handler(context)
        self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        self._closing = True
        self.pause_reading()
        if self._writing:
            self._wait_no_more()
        self._outbox.clear()
        if not self._lost:
            self._lost = True
            # In a later iteration: this may be inside a call of the protocol.
            self._loop.call_soon(self._call_connection_lost, error)

    def _call_connection_lost(self, error: Exception | None) -> None:
        try:
            self._protocol.connection_lost(error)
        finally:
            self._sock.close()

    def __del__(self) -> None:
        if not self._lost:
            self._sock.close()
