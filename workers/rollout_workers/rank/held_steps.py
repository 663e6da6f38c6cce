"""The uncommitted steps that a DP rank holds: what has arrived of each, and where it stands.

    ANNOUNCED --Release--> RELEASED --take--> TAKEN --commit--> (gone)
        +--a later attempt--> ANNOUNCED anew, or withdrawn --> (gone)

Training sees a step only once it is RELEASED, whatever has arrived of it before. A message that the
dispatcher cannot have sent raises ProtocolError and changes nothing; one that it repeats after a
reconnect changes nothing either. A step with samples in payload stores is *resolved* once all of it
is here and those are fetched; any other one is as soon as its header is.

    every micro-batch is here --room, or the loop waits--> fetching --all found--> resolved
                                                              |
                                                              +--some missing--> unresolved

A micro-batch is fetched as a whole, and each in its turn: a step that does not fit is fetched ahead
as far as it does. Invariants: what is fetched, or being fetched, of steps that the training loop
has not begun is at most `limit` bytes, but for the one that it waits for: that is always fetched,
so no rank waits for itself. And Prepared messages are cumulative and sent in the order of the
steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from typing import NamedTuple

from rollout_dispatcher.errors import ProtocolError, StepContractError
from rollout_dispatcher.payload import Reference
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.transport.memory import Memory, copy_bytes
from rollout_workers.rank.payload import Block, carried_blocks, cut


class HeldState(StrEnum):
    """Where a held step stands."""

    ANNOUNCED = "announced"
    RELEASED = "released"
    TAKEN = "taken"


#: State after a Release; one that is repeated after a reconnect changes nothing.
AFTER_RELEASE = {
    HeldState.ANNOUNCED: HeldState.RELEASED,
    HeldState.RELEASED: HeldState.RELEASED,
    HeldState.TAKEN: HeldState.TAKEN,
}


class Received(NamedTuple):
    """A micro-batch as it came: its header, its payload, and where the fields lie in it."""

    header: m.MicroBatch
    payload: memoryview
    blocks: Sequence[Block]

    def copied(self, memory: Memory) -> "Received":
        """The same in memory of its own."""
        copy = memory(self.payload.nbytes)
        copy_bytes(copy, self.payload)
        return Received(self.header, copy, self.blocks)


@dataclass(slots=True)
class HeldStep:
    """A step of which this rank holds the header and the first micro-batches.

    begun: the training loop has asked for one of its micro-batches. handed_out: how often it has
    got one. missing_refs: by index of micro-batch, references to samples that are not fetched yet;
    the header and inline samples have arrived. referenced: bytes to fetch from stores, fetched or
    not, of the micro-batches that have any. asked: those whose samples are being fetched, or
    were. fetching: those that are being fetched. missing: ids of samples that are gone, and why.
    reported: the dispatcher was sent whether the step is resolved.
    """

    header: m.StepHeader
    state: HeldState = HeldState.ANNOUNCED
    micro_batches: list[Received] = field(default_factory=list)
    begun: bool = False
    handed_out: int = 0
    missing_refs: dict[int, list[Reference]] = field(default_factory=dict)
    referenced: dict[int, int] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    fetching: set[int] = field(default_factory=set)
    missing: dict[str, str] = field(default_factory=dict)
    reported: bool = False

    @property
    def num_complete(self) -> int:
        """How many of the first micro-batches are complete: received and fetched."""
        return min(self.missing_refs) if self.missing_refs else len(self.micro_batches)

    @property
    def is_resolved(self) -> bool:
        """Whether all micro-batches are complete, or the step has no references."""
        return not self.header.num_referenced or self.num_complete == self.header.num_micro_batches

    @property
    def is_unresolved(self) -> bool:
        """Whether samples are missing, and no fetch is under way or to come."""
        asked_all = len(self.asked) == len(self.referenced)
        return bool(self.missing) and asked_all and not self.fetching

    def receive(self, header: m.MicroBatch, payload: memoryview) -> None:
        """The next micro-batch came; raises ProtocolError for a payload of another size."""
        schema = self.header.schema_
        if header.places is None:
            received = Received(header, payload, cut(schema, header, payload))
        else:
            described = carried_blocks(schema, header)[1]
            if described != payload.nbytes:
                raise ProtocolError(
                    f"micro-batch {header.index} of step {header.step} describes {described} "
                    f"payload bytes beside what lies elsewhere, the frame carries {payload.nbytes}"
                )
            received = Received(header, payload, ())
            references = [reference for reference in header.references(schema) if reference]
            self.missing_refs[header.index] = references
            nbytes = schema.blocks(header.tokens_held, header.rows_of(schema))[1]
            self.referenced[header.index] = nbytes - described
        self.micro_batches.append(received)

    def fetched(self, index: int, payload: memoryview) -> None:
        """Complete a micro-batch. payload: of all its samples."""
        header = self.micro_batches[index].header
        blocks = cut(self.header.schema_, header, payload)
        self.micro_batches[index] = Received(header, payload, blocks)
        del self.missing_refs[index]
        self.fetching.discard(index)

    def missed(self, index: int, missing: dict[str, str]) -> None:
        """Samples that a micro-batch lacks are gone, by id, and why."""
        self.missing |= missing
        self.fetching.discard(index)


class HeldSteps:
    """Steps in ascending order, and the last one that was committed."""

    def __init__(self) -> None:
        self._steps: dict[int, HeldStep] = {}
        self._newest = -1
        #: The last step that the training loop has committed, -1 for none.
        self.committed = -1

    def __len__(self) -> int:
        return len(self._steps)

    def clear(self) -> None:
        """Forget all steps: others come instead."""
        self._steps.clear()
        self._newest = -1

    def __iter__(self) -> Iterator[HeldStep]:
        return iter(self._steps.values())

    def holds(self, held: HeldStep) -> bool:
        """Whether this step is still held, and was not replaced by a later attempt."""
        return self._steps.get(held.header.step) is held

    @property
    def released(self) -> int:
        """The last step that the training loop may begin, or has begun; -1 for none."""
        open_to_it = (n for n, held in self._steps.items() if held.state is not HeldState.ANNOUNCED)
        return max(open_to_it, default=self.committed)

    def attempts(self) -> list[tuple[int, int]]:
        """Attempt of each held step that was replanned."""
        held = ((number, held.header.attempt) for number, held in self._steps.items())
        return [(number, attempt) for number, attempt in held if attempt]

    def received(self) -> list[tuple[int, int]]:
        """The leading held steps that are resolved, with the number of their received
        micro-batches.

        Reports are cumulative, so no step after an unresolved one is in the list.
        """
        resolved = takewhile(lambda item: item[1].is_resolved, self._steps.items())
        return [(number, len(held.micro_batches)) for number, held in resolved]

    # -- the dispatcher speaks

    def on_header(self, header: m.StepHeader) -> bool:
        """A step's header came; returns whether to report the step."""
        held = self._steps.get(header.step)
        if held is None and header.step <= self.committed:
            return False
        if held is None and header.step <= self._newest:
            raise ProtocolError(f"step {header.step} comes after step {self._newest}")
        if held is None:
            self._steps[header.step] = HeldStep(header)
            self._newest = header.step
        elif header.attempt > held.header.attempt and held.state is HeldState.ANNOUNCED:
            self._steps[header.step] = HeldStep(header)  # in the place of the earlier one
        elif held.header != header:
            raise ProtocolError(
                f"step {header.step} came twice and differs: digest {held.header.digest}, "
                f"then {header.digest}, attempt {held.header.attempt}, then {header.attempt}"
            )
        self._steps[header.step].reported = False
        return True

    def receive(self, header: m.MicroBatch, payload: memoryview) -> HeldStep | None:
        """A micro-batch came; returns its step if there is more of that now."""
        held = self._steps.get(header.step)
        if held is None:
            if header.step <= self.committed:
                return None
            raise ProtocolError(f"a micro-batch of step {header.step}, which was not announced")
        if header.attempt != held.header.attempt:
            raise ProtocolError(
                f"a micro-batch of attempt {header.attempt} at step {header.step}, of which "
                f"attempt {held.header.attempt} was announced"
            )
        due = len(held.micro_batches)
        if header.index < due:
            return None
        if header.index > due or due >= held.header.num_micro_batches:
            raise ProtocolError(
                f"micro-batch {header.index} of step {header.step}, which has "
                f"{held.header.num_micro_batches} of which {due} came before"
            )
        if header.group_numbers:
            _check_groups(held.header, header, header.group_numbers)
        held.receive(header, payload)
        return held

    def withdraw(self, step: int) -> None:
        """Forget a step without samples; no later step is announced."""
        held = self._steps.get(step)
        if held is not None and (held.state is not HeldState.ANNOUNCED or step < self._newest):
            raise ProtocolError(f"step {step} is withdrawn, and it is {held.state} or not the last")
        self._steps.pop(step, None)
        self._newest = min(self._newest, step - 1)

    def release(self, step: int) -> None:
        """Every DP rank holds this step."""
        held = self._steps.get(step)
        if held is not None:
            held.state = AFTER_RELEASE[held.state]
        elif step > self.committed:
            raise ProtocolError(f"release of step {step}, which was not announced")

    # -- payload stores

    def to_fetch(self, limit: int | None, *, waits: bool) -> Iterator["Fetch"]:
        """The fetches to begin now; each counts as begun once yielded.

        limit: bytes ahead, None: any. waits: whether the training loop asked for a step.
        """
        ahead, next_untaken = 0, self.next_untaken()
        for held in self:
            if not held.header.num_referenced:
                continue
            if len(held.micro_batches) < held.header.num_micro_batches:
                return  # later ones have not arrived either
            taken = held.state is HeldState.TAKEN
            for index, nbytes in held.referenced.items():
                ahead += 0 if taken else nbytes
                if index in held.asked:
                    continue
                fits = taken or limit is None or ahead <= limit
                if not fits and not (waits and held is next_untaken):
                    return
                held.asked.add(index)
                held.fetching.add(index)
                yield Fetch(held, held.micro_batches[index], held.missing_refs[index])

    def pop_reports(self) -> Iterator[m.Message]:
        """Prepared and Unresolved messages that were not sent yet; each counts as sent once
        yielded.
        """
        all_before = True
        for held in self:
            all_before &= held.is_resolved
            if not held.reported and all_before:
                held.reported = True
                header = held.header
                yield m.Prepared(step=header.step, digest=header.digest, attempt=header.attempt)
            elif not held.reported and held.is_unresolved:
                held.reported = True
                yield _unresolved(held)

    # -- the training loop

    @property
    def taken(self) -> list[int]:
        """The steps that the training loop has begun and not committed."""
        return [n for n, held in self._steps.items() if held.state is HeldState.TAKEN]

    def unbegun(self) -> int | None:
        """The first taken step such that neither it nor a later one was begun."""
        found = None
        for number in reversed(self.taken):
            if self._steps[number].begun:
                break
            found = number
        return found

    def next_untaken(self) -> HeldStep | None:
        """The first step that is not taken."""
        steps = self._steps.values()
        return next((held for held in steps if held.state is not HeldState.TAKEN), None)

    def find(self, step: int) -> HeldStep:
        """A taken step; raises StepContractError when it was committed."""
        held = self._steps.get(step)
        if held is None:
            raise StepContractError(
                f"step {step} is committed and its micro-batches are gone; iterate before commit()"
            )
        return held

    def commit(self, step: int) -> None:
        """The training loop has applied a step; raises StepContractError out of order."""
        expected = next(iter(self.taken), None)
        if step != expected:
            due = "none is open" if expected is None else f"step {expected} is the next to commit"
            done = "is committed already" if step <= self.committed else "may not be committed now"
            raise StepContractError(f"step {step} {done}; {due}")
        del self._steps[step]
        self.committed = step


def _check_groups(step: m.StepHeader, header: m.MicroBatch, numbers: list[int]) -> None:
    last, groups = max(numbers), len(step.group_loss_tokens or ())
    if last >= groups:
        raise ProtocolError(
            f"micro-batch {header.index} of step {header.step} has samples of group {last}, of "
            f"{groups}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """A micro-batch of a held step, of which samples are to be fetched.

    received: its header, and what came inline. references: where the others are.
    """

    held: HeldStep
    received: Received
    references: Sequence[Reference]


def _unresolved(held: HeldStep) -> m.Unresolved:
    """As many samples as one message takes; the others are missing from the next attempt too."""
    sample_ids = list(held.missing)[: m.MAX_SAMPLES]
    why = "; ".join(dict.fromkeys(held.missing.values()))[: m.MAX_WHY_LETTERS]
    header = held.header
    return m.Unresolved(step=header.step, attempt=header.attempt, sample_ids=sample_ids, why=why)
