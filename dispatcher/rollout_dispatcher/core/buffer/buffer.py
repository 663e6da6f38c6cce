"""The sample buffer: accepted samples that are not planned yet.

Invariants: a sample is here from its acceptance until it is taken or dropped; only samples without
a group and samples of complete groups are *ready*; payload bytes, in memory and in payload stores,
never exceed the hard caps; once the run's schema is known, all samples here have it. Samples are
counted in *units*: single samples, or groups where a batch is counted in groups.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice, repeat
from operator import lt

from rollout_dispatcher.core.buffer.entry import (
    MEMORY_CAP,
    STORES_CAP,
    Amount,
    BufferLimits,
    DropIndex,
    Entry,
)
from rollout_dispatcher.core.buffer.open_groups import OpenGroup, OpenGroups
from rollout_dispatcher.errors import BufferFull, SampleRefused
from rollout_dispatcher.payload import InMemory, Payload, Reference, are_in_memory
from rollout_dispatcher.sample import SIZE_AT_CLOSE, Sample, SamplesByField, Schema

#: `SampleBuffer.schema_source` of a schema that the settings declare.
DECLARED = "declared by --fields"


class SampleBuffer:
    """Holds accepted samples, and lists the ready ones, oldest first.

    keep_groups_whole: whether samples of a group stay together. by_groups: whether a group, and a
    sample without one, is one unit. too_long: length in tokens above which ready samples are listed
    for dropping.
    """

    def __init__(
        self,
        limits: BufferLimits,
        groups: OpenGroups,
        *,
        keep_groups_whole: bool = True,
        by_groups: bool = False,
        too_long: int | None = None,
    ) -> None:
        self.limits, self.groups = limits, groups
        self._keep_groups_whole, self._by_groups = keep_groups_whole, by_groups
        #: The schema of the run's samples, and its origin in words. Unless declared, None until the
        #: first sample is accepted.
        self.schema: Schema | None = None
        self.schema_source = ""
        #: Ready samples by version and length.
        self.drop_index = DropIndex(too_long, limits.micro_batch)
        #: The amount of all buffered samples, ready or not.
        self.held = Amount()
        self._ready: dict[int, Entry] = {}  # by ticket, oldest first
        self._ready_tokens = 0
        #: Number of ready units.
        self.ready_units = 0
        #: The ticket of the next sample.
        self.next_ticket = 0
        #: Rises whenever a sample leaves: blocked pushes may be accepted.
        self.removals = 0

    # -- what is held -----------------------------------------------------------------------

    def __len__(self) -> int:
        return self.held.samples

    @property
    def units(self) -> str:
        """The unit of counts: samples or groups."""
        return "groups" if self._by_groups else "samples"

    @property
    def num_ready(self) -> int:
        """Samples that a plan may choose from."""
        return len(self._ready)

    def oldest_arrival(self) -> float | None:
        """Arrival time of the oldest sample; approximate, as groups are queued when complete."""
        first = list(islice(self._ready.values(), 1))
        first += next((group.entries[:1] for group in self.groups if group.entries), [])
        return min((entry.arrived for entry in first), default=None)

    def entries(self) -> Iterable[Entry]:
        """Every sample that a plan may choose from, oldest first."""
        return self._ready.values()

    def ready(self, limit: int, keep: Callable[[Entry], bool] | None = None) -> list[Entry]:
        """Ready samples of the first `limit` units, groups whole."""
        values: Iterator[Entry] = iter(self._ready.values())
        if keep is not None:
            values = filter(keep, values)
        if self._by_groups:
            return list(_first_groups(values, limit))
        found = list(islice(values, limit + 1))
        if len(found) <= limit:
            return found
        beyond = found.pop().group
        while beyond >= 0 and found and found[-1].group == beyond:
            found.pop()
        return found

    def units_of(self, entries: Collection[Entry]) -> int:
        """Number of units of these samples, groups whole."""
        if not self._by_groups:
            return len(entries)
        return len({(entry.group, -1 if entry.group >= 0 else entry.ticket) for entry in entries})

    # -- checks -----------------------------------------------------------------------------

    def check(self, sample: Sample) -> None:
        """Raise SampleRefused if this sample can never be accepted."""
        if sample.tokens < 1:
            raise SampleRefused("empty", f"sample {sample.sample_id} has no tokens")
        if sample.tokens > self.limits.max_sample_tokens:
            raise SampleRefused(
                "too-long",
                f"sample {sample.sample_id} has {sample.tokens} tokens, the limit is "
                f"{self.limits.max_sample_tokens}; truncate the rollout, raise "
                "--micro-batch-tokens or --set max-sample-tokens, or set --on-oversize alone",
            )
        if sample.loss_tokens >= sample.tokens:
            raise SampleRefused(
                "loss-tokens",
                f"sample {sample.sample_id} claims {sample.loss_tokens} loss tokens of "
                f"{sample.tokens} tokens; the first is never a target, as nothing predicts it",
            )
        if not self._takes(sample.schema):
            raise self._other_fields(sample)
        if isinstance(sample.payload, Reference):
            self._check_reference(sample.sample_id, sample.payload)
        if sample.memory_bytes > self.limits.nbytes:
            raise SampleRefused(
                "larger-than-buffer",
                f"sample {sample.sample_id} has {sample.nbytes} bytes and would not fit an empty "
                f"buffer of {self.limits.nbytes}; raise --buffer-bytes",
            )

    def _takes(self, schema: Schema) -> bool:
        """Whether samples of this schema may be accepted."""
        return self.schema is None or schema is self.schema or schema == self.schema

    def _other_fields(self, sample: Sample) -> SampleRefused:
        """The refusal of a sample with another schema: the difference, and a remedy."""
        assert self.schema is not None
        remedy = "push these fields, or change --fields"
        if self.schema_source != DECLARED:
            remedy = "push the same fields; if that push was wrong, restart with the right --fields"
        return SampleRefused(
            "schema",
            f"sample {sample.sample_id} differs from the run's samples ({self.schema_source}): "
            f"{self.schema.difference(sample.schema)}; {remedy}",
        )

    def _check_reference(self, sample_id: str, reference: Reference) -> None:
        """Raise SampleRefused for a reference into a store that is not allowed, or that never
        fits.
        """
        if (store := reference.stored.store) not in self.limits.stores:
            known = ", ".join(sorted(self.limits.stores)) or "none"
            raise SampleRefused(
                "unknown-store",
                f"sample {sample_id} comes as a reference into the store {store!r}, which is not "
                f"allowed here (allowed: {known}); add it to --payload-stores, or push its tensors "
                "themselves",
            )
        if reference.nbytes > self.limits.referenced_bytes:
            raise SampleRefused(
                "larger-than-buffer",
                f"sample {sample_id} has {reference.nbytes} bytes in a payload store, where all "
                f"may have {self.limits.referenced_bytes}; raise --set referenced-bytes",
            )

    def is_grouped(self, sample: Sample) -> bool:
        """Whether the sample is in a group, and groups stay together."""
        return self._keep_groups_whole and sample.group_id is not None

    def check_group(self, sample: Sample) -> None:
        """Raise SampleRefused if a grouped sample fits no group that a step could take."""
        group_id, size, largest = sample.group_id, sample.group_size, self.limits.group
        assert group_id is not None
        if size < 1 and size != SIZE_AT_CLOSE:
            raise SampleRefused(
                "group-size",
                f"group {group_id} does not say how many samples it has; give group_size with the "
                "sample ('at-close' if close_group gives it), or set --group-size",
            )
        group = self.groups.get(group_id)
        if group is None and self.limits.group_size not in (None, size) and size != SIZE_AT_CLOSE:
            raise SampleRefused(
                "group-size",
                f"group {group_id} is of {size} samples, and --group-size is "
                f"{self.limits.group_size}: push the group whole, or leave --group-size out where "
                "sizes vary",
            )
        if size == SIZE_AT_CLOSE and group is not None:
            size = max(group.size or 0, len(group.entries) + 1)
        if largest is not None and size > largest:
            raise SampleRefused(
                "group-too-large" if sample.group_size > 0 else "group-overflows",
                f"group {group_id} has {size} samples, a step takes at most {largest}; raise "
                "--global-batch-size, or count steps in groups: --global-batch-groups",
            )
        self._check_micro_batch(sample, size, group)
        if group is not None and not group.restored and group.size not in (None, size):
            raise SampleRefused(
                "group-size",
                f"sample {sample.sample_id} says that group {group_id} has {size} samples, its "
                f"first sample gave {group.size}",
            )
        if group is not None and SIZE_AT_CLOSE != sample.group_size <= group.num_accounted:
            raise SampleRefused(
                "group-size",
                f"sample {sample.sample_id} says that group {group_id} has {size} samples, and "
                f"{group.num_accounted} of them have come or never will, besides this one",
            )

    def _check_micro_batch(self, sample: Sample, size: int, group: OpenGroup | None) -> None:
        """Raise SampleRefused if the group has to stay in a micro-batch, and no more fits there."""
        limits = self.limits.micro_batch
        if limits.samples is not None and size > limits.samples:
            raise SampleRefused(
                "group-too-large" if sample.group_size > 0 else "group-overflows",
                f"group {sample.group_id} has {size} samples, a micro-batch takes at most "
                f"{limits.samples} and has to hold all of it; raise --micro-batch-size, or set "
                "--groups rank",
            )
        if limits.tokens is None or limits.drops:
            return
        here = [entry.sample for entry in group.entries] if group is not None else []
        tokens = limits.tokens_of([*here, sample])
        if tokens > limits.tokens:
            raise SampleRefused(
                "group-too-long",
                f"group {sample.group_id} has {tokens} tokens with sample {sample.sample_id}, a "
                f"micro-batch takes at most {limits.tokens} and has to hold the whole group; "
                "raise --micro-batch-tokens, or set --on-oversize alone, or --groups rank",
            )

    def belongs_to_open_group(self, sample: Sample) -> bool:
        """Whether the sample's group is open."""
        return sample.group_id is not None and self.groups.get(sample.group_id) is not None

    def soft_cap(self, units: int = 0, tokens: int = 0) -> BufferFull | None:
        """The soft cap that is reached, or would be with so many more units and tokens, or None."""
        limits = self.limits
        if self.ready_units + units >= limits.samples:
            return BufferFull(self.units, self.ready_units, limits.samples)
        if limits.tokens is not None and self._ready_tokens + tokens >= limits.tokens:
            return BufferFull("tokens", self._ready_tokens, limits.tokens)
        return None

    @property
    def remaining(self) -> int:
        """Further ready units that the soft caps allow; 0 once one is reached."""
        limits = self.limits
        if limits.tokens is not None and self._ready_tokens >= limits.tokens:
            return 0
        return max(0, limits.samples - self.ready_units)

    def hard_cap(self, nbytes: int, referenced: int = 0) -> BufferFull | None:
        """The hard cap that so many more bytes, in memory and in stores, would exceed, or None."""
        buffered, limits = self.held, self.limits
        if buffered.nbytes + nbytes > limits.nbytes:
            return BufferFull(MEMORY_CAP, buffered.nbytes, limits.nbytes)
        if referenced and buffered.referenced + referenced > limits.referenced_bytes:
            return BufferFull(STORES_CAP, buffered.referenced, limits.referenced_bytes)
        return None

    def can_take_fast_path(self, samples: SamplesByField) -> bool:
        """Whether all of these samples pass `check`, and none is in a group that stays together."""
        schema = samples.schemas[0]
        return (
            (not self._keep_groups_whole or set(samples.group_ids) == {None})
            and samples.schemas.count(schema) == len(samples.schemas)
            and self._takes(schema)
            and min(samples.tokens) >= 1
            and max(samples.tokens) <= self.limits.max_sample_tokens
            and all(map(lt, samples.loss_tokens, samples.tokens))
            and self._fit_alone(samples.payloads)
        )

    def _fit_alone(self, payloads: Sequence[Payload]) -> bool:
        """Whether each of these payloads fits an empty buffer."""
        limits = self.limits
        if are_in_memory(payloads):
            return max(map(len, payloads)) <= limits.nbytes
        return all(
            payload.nbytes <= limits.referenced_bytes and payload.stored.store in limits.stores
            if isinstance(payload, Reference)
            else isinstance(payload, InMemory) and payload.nbytes <= limits.nbytes
            for payload in payloads
        )

    # -- accepting --------------------------------------------------------------------------

    def add(self, sample: Sample, producer: str, now: float) -> Entry:
        """Add a sample that passed the checks and is not blocked."""
        entry = Entry(sample, self.next_ticket, now, producer=producer)
        self.next_ticket += 1
        self._add(entry, now)
        return entry

    def add_all(
        self, samples: Sequence[Sample], amount: Amount, producer: str, now: float
    ) -> list[Entry]:
        """Add samples on the fast path that are not blocked."""
        tickets = range(self.next_ticket, self.next_ticket + len(samples))
        entries = list(
            map(Entry, samples, tickets, repeat(now), repeat(-1), repeat(0), repeat(producer))
        )
        self.next_ticket = tickets.stop
        self._ready.update(zip(tickets, entries, strict=True))
        self.ready_units += amount.samples
        self._ready_tokens += amount.tokens
        self.held += amount
        if self.drop_index.watches:
            self.drop_index.add(entries)
        return entries

    def restore(self, entries: Iterable[Entry], next_ticket: int, now: float) -> None:
        """Add the samples that an earlier process had buffered, in order of tickets."""
        self.next_ticket = next_ticket
        for entry in entries:
            self._add(entry, now)
            self._restore_group_size(entry)

    def _restore_group_size(self, entry: Entry) -> None:
        """Restore the group's size from its latest member: members may have been lost before it."""
        sample, group = entry.sample, self.groups.get(entry.sample.group_id or "")
        if group is not None:
            group.restored = True
            group.size = None if sample.group_size == SIZE_AT_CLOSE else sample.group_size
            if group.missing == 0:
                self.complete(group)

    def sized(self, sample: Sample) -> Sample:
        """A grouped sample with its group's present size."""
        group = self.groups.get(sample.group_id or "")
        if group is None or group.size_to_report == sample.group_size or group.size is None:
            return sample
        return sample._replace(group_size=group.size_to_report)

    def complete(self, group: OpenGroup, why: str = "") -> None:
        """Close a group whose members become ready. why: it was abandoned; empty if complete."""
        self.groups.remove(group, why)
        oldest = group.oldest
        for member in group.entries:
            member.oldest = oldest
        if group.entries:
            self._make_ready(group.entries)

    def _add(self, entry: Entry, now: float) -> None:
        sample = entry.sample
        self.held.add(sample)
        if not self.is_grouped(sample):
            self._make_ready([entry])
            return
        if sample.group_size == 1 and not self.belongs_to_open_group(
            sample
        ):  # complete with one member
            self.groups.closed.end(str(sample.group_id))
            self._make_ready([entry])
            return
        group = self.groups.of(sample, now)
        self.groups.add(group, entry, now)
        if group.missing == 0:
            self.complete(group)

    def _make_ready(self, entries: list[Entry]) -> None:
        """Make a sample without a group, or all members of a group, ready."""
        for entry in entries:
            self._ready[entry.ticket] = entry
            self._ready_tokens += entry.sample.tokens
        if self.drop_index.watches:
            self.drop_index.add(entries)
        self.ready_units += 1 if self._by_groups else len(entries)

    # -- removing ---------------------------------------------------------------------------

    def remove(self, entries: Sequence[Entry]) -> None:
        """Remove ready samples, groups whole, that are in a step now or dropped."""
        if not entries:
            return
        for entry in entries:
            del self._ready[entry.ticket]
        if self.drop_index.watches:
            self.drop_index.remove(entries)
        amount = Amount.of_entries(entries)
        self.held -= amount
        self.ready_units -= self.units_of(entries)
        self._ready_tokens -= amount.tokens
        self.removals += 1

    def drop_group(self, group: OpenGroup, why: str | None) -> list[Entry]:
        """Remove an open group, see `OpenGroups.remove`; returns its dropped entries."""
        self.groups.remove(group, why)
        if group.entries:
            self.held -= Amount.of_entries(group.entries)
            self.removals += 1
        return group.entries

    def drop_payloads(self, entries: Iterable[Entry]) -> None:
        """Drop payloads that the journal has from memory, of samples still buffered."""
        for entry in filter(self.holds, entries):
            self.held.nbytes -= entry.sample.memory_bytes
            entry.sample = entry.sample.in_journal()
        self.removals += 1

    def holds(self, entry: Entry) -> bool:
        """Whether a sample is still buffered."""
        group = self.groups.get(entry.sample.group_id or "")
        is_open = group is not None and group.number == entry.group
        return is_open or entry.ticket in self._ready

    def watch_versions(self) -> None:
        """Index ready samples by version in `drop_index`."""
        self.drop_index.watch(self._ready.values())


def _first_groups(entries: Iterator[Entry], limit: int) -> Iterator[Entry]:
    """Entries of the first `limit` groups; members of a group follow each other."""
    last, seen = -2, 0
    for entry in entries:
        if entry.group < 0 or entry.group != last:
            last, seen = entry.group, seen + 1
            if seen > limit:
                return
        yield entry
