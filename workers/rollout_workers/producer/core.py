"""What a producer has outstanding and what it has to say next; no socket, clock or thread.

    BEING PUT --was_put--> QUEUED --take_messages--> SENT --Pushed: accepted, ...--> settled
                             ^                        |
                             +------Pushed: full------+  (room beyond the credits was asked for)
                             +----------lost----------+  (sent again, under the same numbers)

A push with samples of the inline limit or more begins with an object for them in a payload store;
any other one is QUEUED at once. One that is settled is accepted, a duplicate or refused.

Invariants: at most `credits` pushes are SENT, except that a push with a group may be sent beyond
them once per connection, so that members of a group that has its room never wait behind others;
no sequence number below a `floor` that was said is ever sent again; a push leaves this table only
with an answer for every sample, or withdrawn while the dispatcher certainly did not hold it.

What is outstanding is bounded by the callers, each of which waits for its own push.

A control message waits for the pushes it is about, and for its Pong: the dispatcher handles
messages in order, so a Pong confirms all that was said before its Ping; the pings of a connection
are counted for that, those of heartbeats too.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from secrets import token_hex

from rollout_dispatcher.errors import ProtocolError, RunChanged, SampleRefused
from rollout_dispatcher.payload import StoredObject
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import Outcome
from rollout_workers.client.role import Outgoing
from rollout_workers.feedback import FlowControlState
from rollout_workers.producer.encode import EncodedSample
from rollout_workers.producer.pushes import (
    Conflicts,
    MissingMembers,
    PendingPush,
    PushedObjects,
    Put,
    header,
    payload,
)

log = logging.getLogger(__name__)


#: What a producer says beside its pushes.
Control = m.CloseGroup | m.EndPhase | m.EndStream


@dataclass(slots=True)
class _Pending:
    """A message that waits for the pushes before it; `ping` is the Ping that confirms it."""

    message: Control
    after: frozenset[int]
    ping: int | None = None


class Controls:
    """Control messages that are not confirmed, by handles, which are negative."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self._handles = count(-1, -1)
        self._pings = self._pongs = 0

    def add(self, message: Control, after: frozenset[int]) -> int:
        """Queue a message behind these pushes; return its handle."""
        handle = next(self._handles)
        if isinstance(message, m.CloseGroup):
            message = message.model_copy(update={"number": -handle})
        self._pending[handle] = _Pending(message, after)
        return handle

    def forget(self, handle: int) -> None:
        """Nobody waits for this one any more; it is not sent unless it already was."""
        self._pending.pop(handle, None)

    def lost(self) -> None:
        """Everything unconfirmed has to be said again on the next connection."""
        self._pings = self._pongs = 0
        for control in self._pending.values():
            control.ping = None

    def take(self, outstanding: Collection[int]) -> Iterator[m.Message]:
        """What waits for none of the outstanding pushes, each with its Ping."""
        for control in list(self._pending.values()):
            if control.ping is None and control.after.isdisjoint(outstanding):
                yield control.message
                control.ping = self._pings
                yield self.ping()

    def ping(self) -> m.Ping:
        """A Ping to send at once."""
        self._pings += 1
        return m.Ping()

    def ponged(self) -> list[int]:
        """A Pong came; returns the handles of what it confirms. Raises ProtocolError."""
        number = self._pongs
        if number >= self._pings:
            raise ProtocolError("a Pong without a Ping")
        self._pongs += 1
        done = [handle for handle, item in self._pending.items() if item.ping == number]
        for handle in done:
            del self._pending[handle]
        return done


#: After `full` although credits are free (two messages crossed): wait this long, then longer.
FIRST_RETRY_S, LONGEST_RETRY_S = 0.05, 2.0


@dataclass(frozen=True, slots=True)
class Settled:
    """A push is answered (an Outcome or the refusal of each sample), or a control confirmed.

    handle: a push's is its first sequence number, a control's is negative.
    """

    handle: int
    outcomes: tuple[Outcome | SampleRefused, ...] = ()


class ProducerCore:
    """Outstanding pushes and control messages of one producer object.

    welcomed: whether a dispatcher has ever taken its HELLO. on_schema: told of the run's schema.
    run_changed: told that another run is served than before; it may raise what it is told.
    flow: what it was told of the trainer. objects: what it has to do with payload stores.
    """

    #: A producer has always a use for a connection, and what it pushed is confirmed push by push.
    finished, unconfirmed = False, None

    def __init__(
        self,
        client_id: str,
        on_schema: Callable[[m.SchemaKnown | None], None] = lambda _: None,
        run_changed: Callable[[RunChanged], None] = lambda _: None,
    ) -> None:
        self.client_id, self._on_schema, self._run_changed = client_id, on_schema, run_changed
        #: Of the run that welcomed it last, and how many samples that has accepted.
        self.run_id, self._num_accepted = "", 0
        self._key = token_hex(16)
        self.token: str | None = None
        self.max_payload_bytes = 0
        self.welcomed = self._connected = False
        self._credits = self._in_flight = 0
        self._next_seq = 0
        self._accepted = -1  # the last of our numbers that was answered so
        self._pushes: dict[int, PendingPush] = {}  # by first sequence number, in that order
        self._queue: list[int] = []  # heap of pushes to send within credits; may name sent ones
        self._eager: list[int] = []  # pushes with a group that have not been sent beyond credits
        self._later: list[tuple[float, int]] = []  # heap: not before this time
        self._controls = Controls()
        self._shortfalls = MissingMembers()
        self._settled: list[Settled] = []
        self.flow = FlowControlState()
        self.conflicts = Conflicts()
        self.objects = PushedObjects(client_id)

    # -- what the user wants

    def submit(self, samples: Sequence[EncodedSample]) -> int:
        """Take samples of the same `traits`; return a handle.

        Raises SampleRefused for what no dispatcher would take; nothing changes then.
        """
        first = self._next_seq
        put = self.objects.put_for(samples, first)
        nbytes = sum(map(len, put.payload)) if put else sum(sample.nbytes for sample in samples)
        if nbytes > self.max_payload_bytes:
            raise SampleRefused("too-large", self._too_large(nbytes))
        push = PendingPush(header(samples, self.client_id, first), payload(samples), put)
        self._pushes[first] = push
        self._next_seq += len(samples)
        self._shortfalls.pushed_again(push)
        if put is None:
            self._enqueue(first, push)
        else:
            self.objects.puts.append(put)
        return first

    def control(self, message: Control) -> int:
        """Queue a control message behind the pushes it is about; return its handle."""
        after = {
            first
            for first, push in self._pushes.items()
            if not isinstance(message, m.CloseGroup)
            or message.group_id in (push.message.group_ids or ())
        }
        return self._controls.add(message, frozenset(after))

    def abandon(self, handle: int, now: float) -> tuple[bool, m.Blocked | None]:
        """Nobody waits for this push any more.

        It is withdrawn if the dispatcher does not hold it; otherwise it stays until answered, as a
        copy, since the caller may change his arrays from now on.
        Returns whether nothing of it was or will be accepted, and the cap that held it back, if
        the dispatcher named one; none while there is no connection, which it waits for then.
        """
        push = self._pushes.get(handle)
        if push is None:  # it was answered in the moment in which the caller gave up
            return False, None
        blocked = (push.blocked or self._blocked()) if self._connected else None
        if push.sent or push.in_doubt:
            push.detach_from_caller()
            return False, blocked
        del self._pushes[handle]
        self._shortfalls.withdrawn(push, now)
        if push.stored is not None and push.has_orphan_object:
            self.objects.orphans.append(push.stored)
        return not any(push.outcomes), blocked

    @property
    def blocked(self) -> m.Blocked | None:
        """The cap that a push waits at, if the dispatcher named one; None without a connection."""
        return self._blocked() if self._connected else None

    def forget(self, handle: int) -> None:
        """Nobody waits for this control any more; it is not sent unless it already was."""
        self._controls.forget(handle)

    def take_settled(self) -> list[Settled]:
        """What was settled since this was asked for last."""
        settled, self._settled = self._settled, []
        return settled

    # -- payload stores

    def was_put(self, put: Put, stored: StoredObject) -> None:
        """An object is there: its push goes out, unless nobody waits for it any more."""
        push = self._pushes.get(put.handle)
        if push is None:
            self.objects.orphans.append(stored)
        else:
            push.was_put(stored)
            self._enqueue(put.handle, push)

    def was_not_put(self, put: Put, why: object) -> None:
        """No store takes an object: what it would have had is sent, if that can be."""
        push = self._pushes.get(put.handle)
        if push is None:
            return
        push.put = None
        nbytes = sum(map(len, push.payload))
        if nbytes <= self.max_payload_bytes:
            self._enqueue(put.handle, push)
        else:
            del self._pushes[put.handle]
            refused = SampleRefused("too-large", f"{self._too_large(nbytes)}, and {why}")
            self._settled.append(Settled(put.handle, (refused,) * len(push.message.tokens)))

    # -- the connection

    def hello(self) -> m.HelloProducer:
        """The first message of a connection."""
        return m.HelloProducer(
            client_id=self.client_id,
            token=self.token,
            key=self._key,
            incarnation=self.objects.incarnation,
            accepted=self._accepted,
            opens_stores=True,
            feedback=True,
        )

    def lost(self) -> None:
        """Everything unanswered has to be said again on the next connection."""
        self._connected = False
        self._credits = self._in_flight = 0
        self._queue, self._eager, self._later = [], [], []
        for first, push in self._pushes.items():
            push.in_doubt |= push.sent
            push.sent = False
            if not push.is_being_put:
                self._enqueue(first, push)
        self._controls.lost()
        self.objects.requests.lost()

    def take_messages(self, now: float) -> Iterator[Outgoing]:
        """What to send now, each with its payload; taken as sent once yielded."""
        while self._later and self._later[0][0] <= now:
            heappush(self._queue, heappop(self._later)[1])
        while self._in_flight < self._credits and self._queue:
            yield from self._send(heappop(self._queue))
        while self._credits and self._eager:
            yield from self._send(self._eager.pop(0))
        if not self._credits:
            return
        for report in self._shortfalls.pop_due(now):
            self.control(report)
        for message in self._controls.take(self._pushes.keys()):
            yield message, ()
        yield from self.take_answers()

    def take_answers(self) -> Iterator[Outgoing]:
        """What the dispatcher has asked of this process's payload stores is done."""
        for answer in self.objects.requests.take_answers():
            yield answer, ()

    def ping(self) -> m.Ping:
        """A Ping to send at once."""
        return self._controls.ping()

    def wait(self, now: float) -> float | None:
        """Seconds until something may be said that waits for time; None when nothing does."""
        due = [at for at, _ in self._later[:1]]
        due += self._shortfalls.due()
        return max(min(due) - now, 0.0) if due else None

    def receive(self, message: m.Message, payload: memoryview, now: float) -> None:  # noqa: ARG002
        """Take a message from the dispatcher; `take_settled` has what it settles.

        Raises ProtocolError for a message out of turn.
        """
        match message:
            case m.End():
                raise ConnectionError(f"the dispatcher ended the connection: {message.reason}")
            case m.WelcomeProducer():
                self._on_welcome(message)
            case _ if not self._connected:
                raise ProtocolError(f"{type(message).__name__} instead of a welcome")
            case m.Pushed():
                self._pushed(message, now)
                self.flow.update(message)
            case m.Feedback() | m.Dropped():
                self.flow.update(message)
            case m.Blocked():
                self._is_blocked(message)
            case m.SchemaKnown():
                self._on_schema(message)
            case m.Advice():
                log.warning("the dispatcher says: %s", message.text)
            case m.Resend():
                self._resend(message.first_seq)
            case m.Free() | m.Sweep():
                self.objects.requests.receive(message)
            case m.Pong():
                self._settled += map(Settled, self._controls.ponged())
            case _:
                raise ProtocolError(f"a producer has no use for {type(message).__name__}")

    # -- mechanism

    def _on_welcome(self, welcome: m.WelcomeProducer) -> None:
        if self._connected:
            raise ProtocolError("a second welcome")
        if self.run_id not in ("", welcome.run_id):
            self._run_changed(RunChanged(self.run_id, welcome.run_id, self._num_accepted))
            self._accepted, self._num_accepted = -1, 0
        self.run_id = welcome.run_id
        self.welcomed = self._connected = True
        self._credits = welcome.credits
        self.max_payload_bytes = welcome.max_payload_bytes
        self.objects.welcomed(welcome)
        self._on_schema(welcome.schema_known)
        self.flow.welcomed(welcome)

    def _too_large(self, nbytes: int) -> str:
        return (
            f"{nbytes} bytes of sample exceed the dispatcher's frame limit of "
            f"{self.max_payload_bytes} bytes"
        )

    def _enqueue(self, first: int, push: PendingPush) -> None:
        heappush(self._queue, first)
        if push.message.group_ids is not None:
            self._eager.append(first)

    def _send(self, first: int) -> Iterator[Outgoing]:
        push = self._pushes.get(first)
        if push is not None and not push.sent:
            push.sent = True
            self._in_flight += 1
            yield push.message.model_copy(update={"floor": next(iter(self._pushes))}), push.payload

    def _sent(self, first: int) -> PendingPush:
        push = self._pushes.get(first)
        if push is None or not push.sent:
            raise ProtocolError(f"the dispatcher answers push {first}, which is not outstanding")
        return push

    def _pushed(self, answer: m.Pushed, now: float) -> None:
        push = self._sent(answer.first_seq)
        resent, outcomes = push.in_doubt, push.answered(answer)
        self._in_flight -= 1
        settled = tuple([outcome for outcome in outcomes if outcome is not None])
        for at in range(len(outcomes) - 1, -1, -1):
            if outcomes[at] is Outcome.ACCEPTED:
                self._accepted = max(self._accepted, answer.first_seq + at)
                break
        if len(settled) < len(outcomes):
            self._retry(answer.first_seq, push, now)
            return
        del self._pushes[answer.first_seq]
        self._num_accepted += settled.count(Outcome.ACCEPTED)
        if push.message.named and not resent:
            self.conflicts.answered(push.message.sample_ids, settled)
        self._settled.append(Settled(answer.first_seq, settled))

    def _is_blocked(self, blocked: m.Blocked) -> None:
        if blocked.first_seq is not None:
            self._sent(blocked.first_seq).blocked = blocked
            return
        for push in self._pushes.values():
            if push.sent and push.blocked is None:
                push.blocked = blocked

    def _blocked(self) -> m.Blocked | None:
        """What holds others back that were pushed before: those behind them wait for the same."""
        waiting = (push.blocked for push in self._pushes.values() if push.sent)
        return next((blocked for blocked in waiting if blocked is not None), None)

    def _resend(self, first: int) -> None:
        """The dispatcher let go of a payload that it held, and wants it now."""
        push = self._sent(first)
        push.sent = False
        self._in_flight -= 1
        self._enqueue(first, push)

    def _retry(self, first: int, push: PendingPush, now: float) -> None:
        """Send a push that found no room again: when a credit frees, or later if one is free."""
        if self._in_flight >= self._credits:
            heappush(self._queue, first)
            return
        delay = min(FIRST_RETRY_S * 2**push.full_count, LONGEST_RETRY_S)
        push.full_count = min(push.full_count + 1, 16)
        heappush(self._later, (now + delay, first))
