"""The run's schema is decided: by the settings, by an earlier process, or by the first step.

Invariant: from then on all samples that are held have it; others that waited are dropped, counted,
and a fact.
"""

from collections.abc import Iterator

from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.dropping import Dropping
from rollout_dispatcher.core.buffer.lots import DECLARED, Lot
from rollout_dispatcher.core.effects import Effect, LotDropped, SchemaDecided
from rollout_dispatcher.core.facts import Note, Remembered, SchemaFixed
from rollout_dispatcher.sample import Schema

#: Who has decided where a journal from before it said so has steps.
_EARLIER = "set by a step before the restart"


class SchemaChoice:
    """Decides once. declared: in the settings."""

    def __init__(
        self, buffer: SampleBuffer, dropping: Dropping, note: Note, declared: Schema | None
    ) -> None:
        self._buffer, self._lots, self._dropping = buffer, buffer.lots, dropping
        self._note, self._declared = note, declared
        if declared is not None:
            self._lots.fix(declared, DECLARED)

    def planned(self, schema: Schema, now: float) -> list[Effect]:
        """A step of this schema is planned: the first one decides."""
        return [] if self._lots.set_by is not None else [self._decide(schema, None, now)]

    def restore(self, memory: Remembered, now: float) -> None:
        """Go on as an earlier process did, with what it held; the settings come first."""
        if self._declared is not None:
            if self._declared != memory.schema:
                self._decide(self._declared, DECLARED, now)
        elif memory.schema is not None:
            self._lots.fix(memory.schema, memory.set_by)
        elif (schema := next(_of_steps(memory), None)) is not None:
            self._decide(schema, _EARLIER, now)

    def _decide(self, schema: Schema, set_by: str | None, now: float) -> SchemaDecided:
        lots = self._lots
        lots.fix(schema, set_by)
        assert lots.set_by is not None
        self._note(SchemaFixed(schema, lots.set_by))
        why = f"its samples have other fields than the run's ({lots.set_by})"
        dropped = self._dropping.apart(why, now)
        return SchemaDecided(schema, lots.set_by, tuple(self._told(*each) for each in dropped))

    def _told(self, lot: Lot, samples: int) -> LotDropped:
        return LotDropped(samples, lot.first, self._lots.leading.schema.difference(lot.schema))


def _of_steps(memory: Remembered) -> Iterator[Schema]:
    parts = (part for step in (*memory.steps, *memory.retained) for part in step.micro_batches)
    return (entry.sample.schema for part in parts for entries in part for entry in entries)
