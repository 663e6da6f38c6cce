"""The sample buffer: what is accepted and not yet planned, under caps.

Invariants: a sample is here from its acceptance until it is taken or dropped; only samples without
a group and samples of complete groups are *ready*; a group's first sample reserves room for all of
its members, so a member of an open group is never held back; the room used (held and reserved)
exceeds no cap except by what members of an open group turn out larger than its first one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat
from operator import le

from dispatcher.core.room import Amount, BufferLimits, Room
from dispatcher.errors import BufferFull, SampleRefused
from dispatcher.sample import Columns, Sample, Schema


@dataclass(slots=True, eq=False)
class Entry:
    """A buffered sample.

    ticket: its number in order of acceptance.
    group: number of its group, -1 for none; ids of groups may be used again, numbers are not.
    producer: who pushed it, empty if that has no name.
    """

    sample: Sample
    ticket: int
    arrived: float
    group: int = -1
    skips: int = 0
    producer: str = ""


@dataclass(slots=True)
class _OpenGroup:
    """A group that still lacks members; its room is counted at its first sample's size."""

    number: int
    size: int
    opened: float
    first: Sample
    entries: list[Entry] = field(default_factory=list)


class SampleBuffer:
    """Accepts samples, shows the ready ones oldest first, and gives them up when told to."""

    def __init__(self, limits: BufferLimits, *, groups_matter: bool = True) -> None:
        self.limits = limits
        self._groups_matter = groups_matter
        self._tickets = 0
        self._schema: Schema | None = None
        self._ready: dict[int, Entry] = {}
        self._open_groups: dict[str, _OpenGroup] = {}
        self._room = Room(limits)
        #: The cap that last held a sample back, until room is made.
        self.pressed: BufferFull | None = None

    # -- what is held -----------------------------------------------------------------------

    def __len__(self) -> int:
        return self._room.held.samples

    @property
    def held_tokens(self) -> int:
        """Tokens of all held samples."""
        return self._room.held.tokens

    @property
    def held_bytes(self) -> int:
        """Payload bytes of all held samples."""
        return self._room.held.nbytes

    @property
    def num_ready(self) -> int:
        """Samples that a plan may choose from."""
        return len(self._ready)

    @property
    def num_open_groups(self) -> int:
        """Groups that still lack members."""
        return len(self._open_groups)

    def oldest_arrival(self) -> float | None:
        """Arrival time of (about) the oldest sample: groups come into line when complete."""
        first_ready = [entry.arrived for entry in islice(self._ready.values(), 1)]
        first_open = [group.opened for group in islice(self._open_groups.values(), 1)]
        return min(first_ready + first_open, default=None)

    def ready(self, limit: int, keep: Callable[[Entry], bool] | None = None) -> list[Entry]:
        """The first `limit` ready samples, oldest first, no group cut in two at the end."""
        values: Iterator[Entry] = iter(self._ready.values())
        if keep is not None:
            values = filter(keep, values)
        found = list(islice(values, limit + 1))
        if len(found) <= limit:
            return found
        beyond = found.pop().group
        while beyond >= 0 and found and found[-1].group == beyond:
            found.pop()
        return found

    # -- admission --------------------------------------------------------------------------

    def check(self, sample: Sample) -> None:
        """Raise SampleRefused if this sample can never be accepted."""
        if sample.tokens < 1:
            raise SampleRefused("empty", f"sample {sample.sample_id} has no tokens")
        if sample.tokens > self.limits.max_sample_tokens:
            raise SampleRefused(
                "too-long",
                f"sample {sample.sample_id} has {sample.tokens} tokens, the limit is "
                f"{self.limits.max_sample_tokens}; truncate the rollout, raise "
                "--micro-batch-tokens or --max-sample-tokens, or set --oversize alone",
            )
        if sample.loss_tokens > sample.tokens:
            raise SampleRefused(
                "loss-tokens",
                f"sample {sample.sample_id} claims {sample.loss_tokens} loss tokens of "
                f"{sample.tokens} tokens",
            )
        if sample.schema is not self._schema and self._schema not in (None, sample.schema):
            raise SampleRefused(
                "schema",
                f"sample {sample.sample_id} differs from the samples held: "
                f"{self._schema.difference(sample.schema)}",
            )
        self._check_group(sample)
        self._check_fits_empty(sample)

    def is_grouped(self, sample: Sample) -> bool:
        """Whether it is in a group, and groups stay together."""
        return self._groups_matter and sample.group_id is not None

    def is_expected(self, sample: Sample) -> bool:
        """Whether an open group has room reserved for this sample."""
        return sample.group_id is not None and sample.group_id in self._open_groups

    def full(self, sample: Sample) -> BufferFull | None:
        """The cap that holds this sample back now; None if there is room for it."""
        if self.is_expected(sample):
            return None
        times = self._size_of_group(sample)
        full = self._room.lacks(times, times * sample.tokens, times * sample.nbytes)
        if full is not None:
            self.pressed = full
        return full

    def add(self, sample: Sample, now: float) -> Entry:
        """Accept a sample that passed `check` and that `full` found room for."""
        entry = Entry(sample, self._tickets, now)
        self._tickets += 1
        self._hold(entry)
        return entry

    def are_plain(self, samples: Columns) -> bool:
        """Whether each of these samples passes `check` and is in no group that matters."""
        schema = samples.schemas[0]
        return (
            (not self._groups_matter or set(samples.group_ids) == {None})
            and samples.schemas.count(schema) == len(samples.schemas)
            and self._schema in (None, schema)
            and min(samples.tokens) >= 1
            and max(samples.tokens) <= self.limits.max_sample_tokens
            and all(map(le, samples.loss_tokens, samples.tokens))
            and self.limits.would_fit(max(samples.tokens), max(map(len, samples.payloads)))
        )

    def has_room(self, amount: Amount) -> bool:
        """Whether there is room for all of so many samples that are plain."""
        return self._room.lacks(amount.samples, amount.tokens, amount.nbytes) is None

    def add_all(self, samples: Sequence[Sample], amount: Amount, now: float) -> list[Entry]:
        """Accept samples that are plain and that there is room for."""
        tickets = range(self._tickets, self._tickets + len(samples))
        entries = list(map(Entry, samples, tickets, repeat(now)))
        self._tickets = tickets.stop
        self._ready.update(zip(tickets, entries, strict=True))
        self._room.held += amount
        self._schema = samples[-1].schema
        return entries

    def restore(self, entries: Iterable[Entry], next_ticket: int) -> None:
        """Hold again what an earlier process held, in order of tickets."""
        self._tickets = next_ticket
        for entry in entries:
            self._hold(entry)

    def _hold(self, entry: Entry) -> None:
        sample = entry.sample
        self._schema = sample.schema
        self._room.held.add(sample, 1)
        if not self._groups_matter or sample.group_id is None or sample.group_size == 1:
            self._ready[entry.ticket] = entry
        else:
            self._join_group(sample.group_id, entry, entry.arrived)

    def _join_group(self, group_id: str, entry: Entry, now: float) -> None:
        group = self._open_groups.get(group_id)
        if group is None:
            group = _OpenGroup(entry.ticket, entry.sample.group_size, now, entry.sample)
            self._open_groups[group_id] = group
            self._room.reserved.add(group.first, group.size)
        self._room.reserved.add(group.first, -1)
        entry.group = group.number
        group.entries.append(entry)
        if len(group.entries) == group.size:
            del self._open_groups[group_id]
            for member in group.entries:
                self._ready[member.ticket] = member

    def _size_of_group(self, sample: Sample) -> int:
        return sample.group_size if self.is_grouped(sample) else 1

    def _check_group(self, sample: Sample) -> None:
        if not self._groups_matter or sample.group_id is None:
            return
        if sample.group_size < 1:
            raise SampleRefused(
                "group-size",
                f"group {sample.group_id} does not say how many samples it has; give group_size "
                "with the sample, or set --group-size",
            )
        if sample.group_size > self.limits.group:
            raise SampleRefused(
                "group-too-large",
                f"group {sample.group_id} has {sample.group_size} samples, a step takes at most "
                f"{self.limits.group}; raise --dispatch-batch-size",
            )
        group = self._open_groups.get(sample.group_id)
        if group is not None and group.size != sample.group_size:
            raise SampleRefused(
                "group-size",
                f"sample {sample.sample_id} says that group {sample.group_id} has "
                f"{sample.group_size} samples, its first sample said {group.size}",
            )

    def _check_fits_empty(self, sample: Sample) -> None:
        times, limit = self._size_of_group(sample), self.limits
        if not limit.would_fit(times * sample.tokens, times * sample.nbytes):
            raise SampleRefused(
                "larger-than-buffer",
                f"sample {sample.sample_id} (or its group) would not fit an empty buffer of "
                f"{limit.nbytes} bytes and {limit.tokens or 'any number of'} tokens; raise "
                "--buffer-bytes or --buffer-tokens",
            )

    # -- giving up --------------------------------------------------------------------------

    def take(self, entries: Sequence[Entry]) -> None:
        """Remove ready samples: they are in a step now, or dropped."""
        for entry in entries:
            del self._ready[entry.ticket]
        self._room.held -= Amount.of(Columns.of(entry.sample for entry in entries))
        self._room_made()

    def drop_group(self, group_id: str) -> list[Entry]:
        """Remove an open group whole; returns what was dropped, nothing if it is not open."""
        group = self._open_groups.pop(group_id, None)
        if group is None:
            return []
        self._room.reserved.add(group.first, len(group.entries) - group.size)
        for entry in group.entries:
            self._room.held.add(entry.sample, -1)
        self._room_made()
        return group.entries

    def open_groups(self) -> Iterator[tuple[str, float, list[Entry]]]:
        """Incomplete groups, in order of opening: id, time of the first sample, members so far."""
        for group_id, group in self._open_groups.items():
            yield group_id, group.opened, group.entries

    def drop_ready(self, stale: Callable[[Entry], bool]) -> list[Entry]:
        """Remove every ready sample that is stale, each with its whole group; returns them."""
        groups = {entry.group for entry in self._ready.values() if stale(entry)} - {-1}
        doomed = [entry for entry in self._ready.values() if entry.group in groups or stale(entry)]
        if doomed:  # else no room was made, and a producer that was held back still is
            self.take(doomed)
        return doomed

    def _room_made(self) -> None:
        self.pressed = None
        if not self._room.held.samples:
            self._schema = None
