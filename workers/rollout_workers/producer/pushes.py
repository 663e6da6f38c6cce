"""A pending push: its message, its payload, and the outcomes of its samples so far.

Which of its samples go into a payload store:

    large ones   end to end in one object, under the key `INCARNATION/FIRST-SEQUENCE-NUMBER`
    the others   in the payload of the frame

Invariant: a key is used for one push of one process, so it never stands for other bytes.

An object is the producer's until its push is sent; from then on the dispatcher says when it goes.

A group that lacks a withdrawn member can never complete, so the dispatcher is told, but only after
the caller had `GRACE_S` seconds to push the member again.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate, compress, islice
from operator import not_
from secrets import token_hex
from typing import Any, TypeVar

from pydantic import ValidationError

from rollout_dispatcher.errors import SampleRefused, ShuttingDown, StreamEnded
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.assemble import places_of
from rollout_dispatcher.protocol.outbox import JOINED_BYTES, Buffer
from rollout_dispatcher.sample import Outcome, Schema
from rollout_dispatcher.spans import ALIGNMENT, PADDING
from rollout_workers.producer.encode import EncodedSample, EncodedSamples, refusal
from rollout_workers.stores.requests import StoreRequests

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Put:
    """An object that is to be put before its push goes out.

    handle: of the push. spans: what the object consists of; the caller's memory mostly. large:
    which samples of the push are in it. sizes: bytes of those. payload: what is sent beside it.
    """

    handle: int
    key: str
    spans: Sequence[Buffer]
    large: Sequence[bool]
    sizes: Sequence[int]
    payload: Sequence[Buffer]

    def placed(self, stored: StoredObject) -> dict[str, Any]:
        """Keys of the push, once the object is there."""
        lying = zip(accumulate(self.sizes, initial=0), self.sizes, strict=False)
        return places_of(
            Reference(stored, *next(lying)) if is_large else None for is_large in self.large
        )


#: Begins the id that a sample gets when its user gave none, and it may have to be pushed again.
GENERATED = "generated/"
#: None where a sample met `full` and has to be sent again.
Answer = Outcome | SampleRefused | None


@dataclass(slots=True)
class PendingPush:
    """A push without outcomes for all samples. payload: mostly the caller's memory. put: what of it
    goes into a payload store before it is sent, and stored: where that is, once it is. in_doubt: it
    was in flight when a connection ended. full_count: how often it was answered `full` although
    credits were free. outcomes: of each sample; empty before the first answer.
    """

    message: m.Push
    payload: Sequence[Buffer]
    put: Put | None = None
    stored: StoredObject | None = None
    sent: bool = False
    in_doubt: bool = False
    full_count: int = 0
    blocked: m.Blocked | None = None
    outcomes: Sequence[Answer] = ()
    #: All that its samples consist of, wherever it is sent or put.
    _contents: Sequence[Buffer] = field(init=False)

    def __post_init__(self) -> None:
        self._contents = self.payload

    @property
    def is_being_put(self) -> bool:
        """Whether its object is still being put."""
        return self.put is not None and self.stored is None

    @property
    def has_orphan_object(self) -> bool:
        """Whether the push has put an object of which the dispatcher has accepted no sample."""
        known = any(isinstance(outcome, Outcome) for outcome in self.outcomes)
        return self.stored is not None and not known

    def was_put(self, stored: StoredObject) -> None:
        """Its object was put."""
        assert self.put is not None
        self.message = self.message.model_copy(update=self.put.placed(stored))
        self.payload, self.stored = self.put.payload, stored

    def detach_from_caller(self) -> None:
        """Copy the payload, so that the caller may change its arrays."""
        self.payload = [b"".join(self.payload)]
        self._contents = ()

    def answered(self, answer: m.Pushed) -> Sequence[Answer]:
        """Take an answer; returns the outcome of each sample so far."""
        self.outcomes = self._known(answer)
        self.sent = self.in_doubt = False
        return self.outcomes

    def identities(self) -> list[str] | list[bytes]:
        """What identifies each sample if it is pushed again: its id, or a digest of its content."""
        ids = self.message.sample_ids
        if self.message.named and not any(given.startswith(GENERATED) for given in ids):
            return ids
        if self.put is None and self.message.places is not None:  # all of it lay in stores before
            stored = list(map(repr, self.message.objects or ()))
            return [f"{stored[at[0]]}@{at[1]}" for at in self.message.places if at is not None]
        data, stop = b"".join(self._contents), 0
        found = []
        for size in self.message.sizes():
            start, stop = stop, stop + size
            found.append(blake2b(data[start:stop], digest_size=16).digest())
        return found

    def _known(self, answer: m.Pushed) -> Sequence[Answer]:
        words = answer.of_each(len(self.message.tokens))
        if not self.outcomes and answer.outcomes == [Outcome.ACCEPTED]:
            return [Outcome.ACCEPTED] * len(words)  # as nearly always
        known = self.outcomes or [None] * len(words)
        return [
            self._outcome(word, str(index), answer) if before is None else before
            for index, (word, before) in enumerate(zip(words, known, strict=True))
        ]

    def _outcome(self, outcome: Outcome, index: str, answer: m.Pushed) -> Answer:
        match outcome:
            case Outcome.ACCEPTED:
                return Outcome.ACCEPTED
            case Outcome.DUPLICATE | Outcome.CONFLICT:
                # Without names it can only be our own number: it was accepted before.
                return outcome if self.message.named else Outcome.ACCEPTED
            case Outcome.REFUSED:
                error = answer.errors.get(index, "the dispatcher refused the sample")
                reason = answer.reasons.get(index, SampleRefused.code)
                if reason == ShuttingDown.code:
                    return ShuttingDown(error)
                if reason == "closed":
                    return StreamEnded(error)
                return SampleRefused(reason, error)
            case Outcome.FULL:
                return None


class Conflicts:
    """Counts samples that have other content than the accepted ones of their ids."""

    def __init__(self) -> None:
        self._count = 0

    def answered(self, ids: Sequence[str], outcomes: Sequence[Answer]) -> None:
        """Log the first of samples with user-given ids that were not in flight before."""
        for sample_id, outcome in zip(ids, outcomes, strict=True):
            if outcome is Outcome.CONFLICT:
                self._count += 1
                if self._count == 1:
                    log.warning(
                        "sample %s has other content than the accepted sample of this id, which is "
                        "kept: the new one is not trained on; give each rollout an id of its own, "
                        "with its epoch or step in it, or no sample_id. This is said once, push() "
                        "returns Outcome.CONFLICT for each", sample_id,
                    )  # fmt: skip

    def end(self) -> None:
        """The producer is closed."""
        if self._count > 1:
            log.warning("%d samples had ids of accepted ones with other content", self._count)


#: Seconds for which a withdrawn member may be pushed again before its group is given up.
GRACE_S = 10.0


@dataclass(slots=True)
class _GroupShort:
    """Withdrawn members of one group. size: of the group, None if it is told at close. members:
    identity by sequence number. due: when the dispatcher is told.
    """

    size: int | None
    members: dict[int, str | bytes] = field(default_factory=dict)
    due: float = math.inf


class MissingMembers:
    """Withdrawn members of all groups."""

    def __init__(self) -> None:
        self._groups: dict[str, _GroupShort] = {}

    def due(self) -> Iterator[float]:
        """When the dispatcher is to be told, for each group."""
        return (short.due for short in self._groups.values())

    def withdrawn(self, push: PendingPush, now: float) -> None:
        """Note the grouped samples of a withdrawn push as missing, until they are pushed again."""
        message = push.message
        if message.group_ids is None:
            return
        identities = push.identities()
        for at, group_id in enumerate(message.group_ids):
            if group_id is not None:
                size = None if message.group_sizes is None else message.group_sizes[at] or None
                short = self._groups.setdefault(group_id, _GroupShort(size))
                short.members[message.first_seq + at] = identities[at]
                short.due = now + GRACE_S

    def pushed_again(self, push: PendingPush) -> None:
        """Forget missing members that this push brings again."""
        groups: Iterable[str | None] = push.message.group_ids or ()
        if self._groups.keys().isdisjoint(groups):
            return
        for identity, group_id in zip(push.identities(), groups, strict=True):
            short = None if group_id is None else self._groups.get(group_id)
            if short is None or group_id is None:
                continue
            again = [seq for seq, known in short.members.items() if known == identity]
            for seq in again[:1]:
                del short.members[seq]
            if not short.members:
                del self._groups[group_id]

    def pop_due(self, now: float) -> list[m.CloseGroup]:
        """Messages for members that were not pushed again in time; sent like a control message."""
        late = [(group, short) for group, short in self._groups.items() if short.due <= now]
        for group_id, _ in late:
            del self._groups[group_id]
        return [
            m.CloseGroup(group_id=group_id, size=short.size, withdrawn=list(part))
            for group_id, short in late
            for part in _batched(short.members)
        ]


def _batched(numbers: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """In parts that fit a message each."""
    left = iter(numbers)
    return iter(lambda: tuple(islice(left, m.MAX_SAMPLES)), ())


_T = TypeVar("_T")

#: One frame's worth of samples: large enough that headers do not matter, small enough that a
#: heartbeat behind it is not late, and that the header stays far below any limit.
BATCH_BYTES = 8 * 1024 * 1024
BATCH_SAMPLES = 256


def batches(
    samples: Sequence[EncodedSample], max_payload_bytes: int
) -> Iterator[Sequence[EncodedSample]]:
    """Consecutive runs of samples that one push can carry; all of them have references, or none."""
    limit = min(BATCH_BYTES, max_payload_bytes)
    start, nbytes = 0, 0
    for stop, sample in enumerate(samples):
        full = nbytes + sample.nbytes > limit or stop - start >= BATCH_SAMPLES
        if stop > start and (full or not _alike(sample, samples[start])):
            yield samples[start:stop]
            start, nbytes = stop, 0
        nbytes += sample.nbytes
    if len(samples) > start:
        yield samples[start:]


def header(samples: Sequence[EncodedSample], client_id: str, first_seq: int) -> m.Push:
    """The message of a push; samples without an id are named by their number.

    Raises SampleRefused for metadata that no dispatcher takes.
    """
    by = EncodedSamples.of(samples)
    group_ids = _unless_empty(by.group_ids)
    sized = group_ids is not None and _is_sized(samples[0])
    named = samples[0].sample_id is not None
    try:
        return m.Push(
            fields=m.field_headers(samples[0].schema),
            tokens=by.tokens,
            loss_tokens=by.loss_tokens,
            sample_ids=by.sample_ids
            if named
            else [f"{client_id}/{first_seq + at}" for at in range(len(samples))],
            group_ids=group_ids,
            group_sizes=[1 if size is None else size for size in by.group_sizes] if sized else None,
            policy_versions=_unless_empty(by.policy_versions),
            staleness_exempt=by.staleness_exempt if any(by.staleness_exempt) else None,
            rows=_rows(samples[0].schema, by.rows),
            left_out=sum(by.left_out),
            first_seq=first_seq,
            floor=first_seq,
            named=named,
            checksums=by.checksums if named else None,
            **({} if samples[0].reference is None else places_of(by.references)),
        )
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)[0]) from error


def payload(samples: Iterable[EncodedSample]) -> list[Buffer]:
    """The spans of samples end to end: large arrays where they are, all else joined."""
    buffers: list[Buffer] = []
    small: list[Any] = []
    for sample in samples:
        for array in sample.arrays:
            nbytes = array.nbytes
            if nbytes < JOINED_BYTES:
                small.append(array)
            else:
                if small:
                    buffers.append(b"".join(small))
                    small.clear()
                buffers.append(array.data.cast("B"))
            if padding := PADDING[nbytes % ALIGNMENT]:
                small.append(padding)
    if small:
        buffers.append(b"".join(small))
    return buffers


def _alike(one: EncodedSample, other: EncodedSample) -> bool:
    """Whether two samples can share a push: the same fields, and the same metadata given."""
    return (
        (one.schema is other.schema or one.schema == other.schema)
        and (one.sample_id is None) == (other.sample_id is None)
        and _is_sized(one) == _is_sized(other)
    )


def _rows(schema: Schema, rows: Iterable[tuple[int, ...]]) -> dict[str, list[int]] | None:
    """Of each ragged field the rows of each sample; None without any."""
    if not schema.ragged:
        return None
    return dict(zip(schema.ragged, map(list, zip(*rows, strict=True)), strict=True))


def _is_sized(sample: EncodedSample) -> bool:
    """Whether the size of its group is known; a sample without a group is one of one."""
    return sample.group_id is None or sample.group_size is not None


def _unless_empty(values: list[_T | None]) -> list[_T | None] | None:
    return values if any(value is not None for value in values) else None


class PushedObjects:
    """Per producer instance: objects to put into payload stores, and orphaned ones to delete.

    stores: addresses that are allowed. requests: the dispatcher's. puts: objects to put now.
    orphans: objects to delete now, which only this producer knows.
    """

    def __init__(self, client_id: str) -> None:
        #: What its keys begin with: never the same in two processes.
        self.incarnation = f"{client_id}.{token_hex(4)}"
        self._inline_limit: int | None = None
        self.stores: tuple[str, ...] = ()
        self.requests = StoreRequests()
        self.puts: list[Put] = []
        self.orphans: list[StoredObject] = []

    def welcomed(self, welcome: m.WelcomeProducer) -> None:
        """Take the allowed stores and the inline limit from the welcome."""
        self.stores = tuple(welcome.payload_stores)
        self._inline_limit = welcome.inline_limit if self.stores else None

    def put_for(self, samples: Sequence[EncodedSample], first: int) -> Put | None:
        """The object for samples of at least `inline_limit` bytes; None if there are none."""
        limit = self._inline_limit
        if limit is None:
            return None
        large = [sample.nbytes >= limit and sample.reference is None for sample in samples]
        if not any(large):
            return None
        inside = list(compress(samples, large))
        beside = payload(compress(samples, map(not_, large)))
        key, sizes = f"{self.incarnation}/{first}", [one.nbytes for one in inside]
        return Put(first, key, payload(inside), large, sizes, beside)

    def pop_puts(self) -> list[Put]:
        """Return and clear the objects to put."""
        puts, self.puts = self.puts, []
        return puts

    def pop_orphans(self) -> list[StoredObject]:
        """Return and clear the orphans to delete."""
        orphans, self.orphans = self.orphans, []
        return orphans
