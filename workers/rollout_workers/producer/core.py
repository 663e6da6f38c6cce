"""What a producer has outstanding and what it has to say next; no socket, clock or thread.

    QUEUED --outgoing--> SENT --Pushed: accepted, duplicate, refused--> settled
      ^                   |
      +---Pushed: full----+        (room beyond the credits was asked for, and there was none)
      +---disconnected----+        (every unanswered push is sent again, same numbers)

Invariants: at most `credits` pushes are SENT, except that a push with a group may be sent beyond
them once per connection, so that members of a group that has its room never wait behind others;
no sequence number below a `floor` that was said is ever sent again; a push leaves this table only
with an answer for every sample, or withdrawn while the dispatcher certainly did not hold it.

What is outstanding is bounded by the callers, each of which waits for its own push.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import count

from rollout_dispatcher.errors import ProtocolError, SampleRefused
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_dispatcher.sample import Outcome
from rollout_workers.producer.batches import header, payload
from rollout_workers.producer.encode import EncodedSample

#: After `full` although credits are free (two messages crossed): wait this long, then longer.
FIRST_RETRY_S, LONGEST_RETRY_S = 0.05, 2.0
#: A member that was withdrawn may be pushed again for so long before its group is given up.
GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class Settled:
    """A push is answered (an Outcome or the refusal of each sample), or a control confirmed.

    handle: a push's is its first sequence number, a control's is negative.
    """

    handle: int
    outcomes: tuple[Outcome | SampleRefused, ...] = ()


@dataclass(slots=True)
class _Push:
    """A push that is not settled.

    payload: mostly memory of the caller's, who waits. uncertain: it was on its way when a
    connection ended. fulls: how often it met `full` though credits were free. outcomes: of each
    sample, None where it met `full`; empty before the first answer.
    """

    message: m.Push
    payload: Sequence[Buffer]
    sent: bool = False
    uncertain: bool = False
    fulls: int = 0
    blocked: m.Blocked | None = None
    outcomes: Sequence[Outcome | SampleRefused | None] = ()


@dataclass(slots=True)
class _Control:
    """A message that waits for the pushes before it; `ping` is the Ping that confirms it."""

    message: m.Message
    after: frozenset[int]
    ping: int | None = None


@dataclass(slots=True)
class _Lacking:
    """Members of a group that were withdrawn, by number, and when that is told.

    size: of the group, None if it is told at close. members: what each is known by.
    """

    size: int | None
    members: dict[int, str | bytes] = field(default_factory=dict)
    due: float = math.inf


def _identities(push: _Push) -> list[str] | list[bytes]:
    """What each sample of a push is known by if it comes again: its id, or what it consists of."""
    message = push.message
    if message.named:
        return message.sample_ids
    data, stop = b"".join(push.payload), 0
    found = []
    for size in message.spans(len(data)):
        start, stop = stop, stop + size
        found.append(blake2b(data[start:stop], digest_size=16).digest())
    return found


class ProducerCore:
    """Outstanding pushes and control messages of one producer object."""

    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        self.token: str | None = None  # that HELLO shows
        self.max_payload_bytes = 0
        self._credits = self._in_flight = 0
        self._next_seq = 0
        self._pushes: dict[int, _Push] = {}  # by first sequence number, in that order
        self._queue: list[int] = []  # heap of pushes to send within credits; may name sent ones
        self._eager: list[int] = []  # pushes with a group that have not been sent beyond credits
        self._later: list[tuple[float, int]] = []  # heap: not before this time
        self._controls: dict[int, _Control] = {}
        self._control_ids = count(-1, -1)
        self._lacking: dict[str, _Lacking] = {}  # by group
        self._pings = self._pongs = 0

    # -- what the user wants

    def submit(self, samples: Sequence[EncodedSample]) -> int:
        """Take samples of the same `traits`; return a handle.

        Raises SampleRefused for what no dispatcher would take; nothing changes then.
        """
        first = self._next_seq
        nbytes = sum(sample.nbytes for sample in samples)
        if nbytes > self.max_payload_bytes:
            raise SampleRefused(
                "too-large",
                f"{nbytes} bytes of sample exceed the dispatcher's frame limit of "
                f"{self.max_payload_bytes} bytes",
            )
        self._pushes[first] = push = _Push(header(samples, self.client_id, first), payload(samples))
        self._next_seq += len(samples)
        self._come_again(push)
        self._enqueue(first, push)
        return first

    def control(self, message: m.CloseGroup | m.EndPhase | m.EndStream) -> int:
        """Queue a control message behind the pushes it is about; return its handle."""
        after = {
            first
            for first, push in self._pushes.items()
            if not isinstance(message, m.CloseGroup)
            or message.group_id in (push.message.group_ids or ())
        }
        handle = next(self._control_ids)
        if isinstance(message, m.CloseGroup):
            message = message.model_copy(update={"number": -handle})
        self._controls[handle] = _Control(message, frozenset(after))
        return handle

    def abandon(self, handle: int, now: float) -> tuple[bool, m.Blocked | None]:
        """Nobody waits for this push any more.

        It is withdrawn if the dispatcher does not hold it; otherwise it stays until answered, as a
        copy, since the caller may change his arrays from now on.
        Returns whether nothing of it was or will be accepted, and the cap that held it back, if
        the dispatcher named one.
        """
        push = self._pushes[handle]
        blocked = push.blocked or self._blocked()
        if push.sent or push.uncertain:
            push.payload = [b"".join(push.payload)]
            return False, blocked
        del self._pushes[handle]
        self._give_up_members(push, now)
        return not any(push.outcomes), blocked

    def forget(self, handle: int) -> None:
        """Nobody waits for this control any more; it is not sent unless it already was."""
        self._controls.pop(handle, None)

    # -- what the connection reports

    def hello(self) -> m.HelloProducer:
        """The first message of a connection."""
        return m.HelloProducer(client_id=self.client_id, token=self.token)

    def connected(self, welcome: m.WelcomeProducer) -> None:
        """The dispatcher took the HELLO."""
        self._credits = welcome.credits
        self.max_payload_bytes = welcome.max_payload_bytes

    def disconnected(self) -> None:
        """Everything unanswered has to be said again on the next connection."""
        self._credits = self._in_flight = 0
        self._pings = self._pongs = 0
        self._queue, self._eager, self._later = [], [], []
        for first, push in self._pushes.items():
            push.uncertain |= push.sent
            push.sent = False
            self._enqueue(first, push)
        for control in self._controls.values():
            control.ping = None

    def outgoing(self, now: float) -> Iterator[tuple[m.Message, Sequence[Buffer]]]:
        """What to send now, each with its payload; taken as sent once yielded."""
        while self._later and self._later[0][0] <= now:
            heappush(self._queue, heappop(self._later)[1])
        while self._in_flight < self._credits and self._queue:
            yield from self._send(heappop(self._queue))
        while self._credits and self._eager:
            yield from self._send(self._eager.pop(0))
        if not self._credits:
            return
        self._tell_lacking(now)
        for control in list(self._controls.values()):
            if control.ping is None and control.after.isdisjoint(self._pushes):
                yield control.message, ()
                control.ping = self._pings
                yield self.ping(), ()

    def ping(self) -> m.Ping:
        """A Ping to send at once; controls know theirs by its number on this connection."""
        self._pings += 1
        return m.Ping()

    def wait(self, now: float) -> float | None:
        """Seconds until something may be said that waits for time; None when nothing does."""
        due = [at for at, _ in self._later[:1]]
        due += [lacking.due for lacking in self._lacking.values()]
        return max(min(due) - now, 0.0) if due else None

    def handle(self, message: m.Message, now: float) -> list[Settled]:
        """Take a message; return what it settles.

        Raises ProtocolError for a message out of turn.
        """
        match message:
            case m.Pushed():
                return self._pushed(message, now)
            case m.Blocked(first_seq=None):
                for push in self._pushes.values():
                    if push.sent and push.blocked is None:
                        push.blocked = message
                return []
            case m.Blocked(first_seq=int(first)):
                self._sent(first).blocked = message
                return []
            case m.Resend():
                self._resend(message.first_seq)
                return []
            case m.Pong():
                return self._pong()
            case _:
                raise ProtocolError(f"a producer has no use for {type(message).__name__}")

    # -- mechanism

    def _enqueue(self, first: int, push: _Push) -> None:
        heappush(self._queue, first)
        if push.message.group_ids is not None:
            self._eager.append(first)

    def _send(self, first: int) -> Iterator[tuple[m.Message, Sequence[Buffer]]]:
        push = self._pushes.get(first)
        if push is not None and not push.sent:
            push.sent = True
            self._in_flight += 1
            yield push.message.model_copy(update={"floor": next(iter(self._pushes))}), push.payload

    def _sent(self, first: int) -> _Push:
        push = self._pushes.get(first)
        if push is None or not push.sent:
            raise ProtocolError(f"the dispatcher answers push {first}, which is not outstanding")
        return push

    def _pushed(self, answer: m.Pushed, now: float) -> list[Settled]:
        push = self._sent(answer.first_seq)
        outcomes = self._outcomes(push, answer)
        push.outcomes, push.sent, push.uncertain = outcomes, False, False
        self._in_flight -= 1
        settled = tuple([outcome for outcome in outcomes if outcome is not None])
        if len(settled) < len(outcomes):
            self._retry(answer.first_seq, push, now)
            return []
        del self._pushes[answer.first_seq]
        return [Settled(answer.first_seq, settled)]

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

    def _give_up_members(self, push: _Push, now: float) -> None:
        """Members are withdrawn: their groups lack them, unless they are soon pushed once more."""
        message = push.message
        identities = _identities(push)
        for at, group_id in enumerate(message.group_ids or ()):
            if group_id is not None:
                size = None if message.group_sizes is None else message.group_sizes[at] or None
                lacking = self._lacking.setdefault(group_id, _Lacking(size))
                lacking.members[message.first_seq + at] = identities[at]
                lacking.due = now + GRACE_S

    def _come_again(self, push: _Push) -> None:
        """What was withdrawn of these groups may be tried again."""
        groups = push.message.group_ids or ()
        if self._lacking.keys().isdisjoint(groups):
            return
        for identity, group_id in zip(_identities(push), groups, strict=True):
            lacking = None if group_id is None else self._lacking.get(group_id)
            if lacking is None or group_id is None:
                continue
            again = [seq for seq, known in lacking.members.items() if known == identity]
            for seq in again[:1]:
                del lacking.members[seq]
            if not lacking.members:
                del self._lacking[group_id]

    def _tell_lacking(self, now: float) -> None:
        """What was not pushed again in time is said like a control."""
        for group_id, lacking in list(self._lacking.items()):
            if lacking.due <= now:
                del self._lacking[group_id]
                numbers = list(lacking.members)
                self.control(m.CloseGroup(group_id=group_id, size=lacking.size, withdrawn=numbers))

    def _outcomes(self, push: _Push, answer: m.Pushed) -> Sequence[Outcome | SampleRefused | None]:
        """What is known of each sample of a push now; None where it has to be sent again."""
        words = answer.of_each(len(push.message.tokens))
        if not push.outcomes and answer.outcomes == [Outcome.ACCEPTED]:
            return [Outcome.ACCEPTED] * len(words)  # as nearly always
        known = push.outcomes or [None] * len(words)
        return [
            self._outcome(push, word, answer.errors.get(str(index))) if before is None else before
            for index, (word, before) in enumerate(zip(words, known, strict=True))
        ]

    def _outcome(
        self, push: _Push, said: Outcome, error: str | None
    ) -> Outcome | SampleRefused | None:
        match said:
            case Outcome.ACCEPTED:
                return Outcome.ACCEPTED
            case Outcome.DUPLICATE:
                # Without names it can only be our own number: it was accepted before.
                return Outcome.DUPLICATE if push.message.named else Outcome.ACCEPTED
            case Outcome.REFUSED:
                return SampleRefused("refused", error or "the dispatcher refused the sample")
            case Outcome.FULL:
                return None

    def _retry(self, first: int, push: _Push, now: float) -> None:
        """Send a push that found no room again: when a credit frees, or later if one is free."""
        if self._in_flight >= self._credits:
            heappush(self._queue, first)
            return
        delay = min(FIRST_RETRY_S * 2**push.fulls, LONGEST_RETRY_S)
        push.fulls = min(push.fulls + 1, 16)
        heappush(self._later, (now + delay, first))

    def _pong(self) -> list[Settled]:
        """Messages are handled in order, so a Pong confirms all that was said before its Ping."""
        number, self._pongs = self._pongs, self._pongs + 1
        if number >= self._pings:
            raise ProtocolError("a Pong without a Ping")
        done = [handle for handle, item in self._controls.items() if item.ping == number]
        for handle in done:
            del self._controls[handle]
        return [Settled(handle) for handle in done]
