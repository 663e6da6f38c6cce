"""Lots: samples of one schema each, held apart until it is decided which schema a run has.

    no sample yet --samples of up to MAX_SCHEMAS schemas, a lot each--> one lot leads
    one lot leads --the first step is planned, of that lot--> its schema is the run's
    declared (`--fields`) -------------------------------------> it is from the beginning

A step has one schema, so a plan chooses from one lot: from the one that *leads*, which is the first
that has a whole batch; while none has, the largest. What counts towards the next step is
what is ready of that lot; caps count all of them. Invariants: no lot has more ready units than the
one that leads, unless that has a whole batch; once the run's schema is decided there is no other
lot, but for the moment in which the others are dropped.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from rollout_dispatcher.core.buffer.ages import Ages
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.buffer.limits import NO_LIMITS, MicroBatchLimits
from rollout_dispatcher.errors import SampleRefused
from rollout_dispatcher.sample import Sample, Schema

#: Schemas of which samples wait at a time: a run has one, and strays are few.
MAX_SCHEMAS = 8
#: Who has decided on the schema, where it was given with the settings.
DECLARED = "declared by --fields"
_NONE = Schema(())


@dataclass(slots=True, eq=False)
class Lot:
    """Samples of one schema.

    first: who pushed the first of them; empty over HTTP. ages: of its ready samples. ready: by
    ticket, oldest first. samples: all of them, those of open groups too. units: ready ones, as a
    batch counts.
    """

    schema: Schema
    first: str
    ages: Ages
    ready: dict[int, Entry] = field(default_factory=dict)
    samples: int = 0
    units: int = 0

    @property
    def set_by(self) -> str:
        """In words, who decides on the run's schema if the first step is of this lot."""
        who = f"producer {self.first}" if self.first else "an HTTP client"
        return f"set by the first step, whose samples {who} pushed first"


class Lots:
    """The lots of a buffer. batch: units of a step. too_long, micro_batch: as `Ages` has them."""

    def __init__(
        self,
        batch: int,
        too_long: int | None = None,
        micro_batch: MicroBatchLimits = NO_LIMITS,
    ) -> None:
        self._batch, self._too_long, self._micro_batch = batch, too_long, micro_batch
        self._watches = False
        self._lots: dict[Schema, Lot] = {}
        #: The lot that the next step is planned from.
        self.leading = self._begin(_NONE, "")
        #: In words, who has decided on the run's schema; None while it is not decided.
        self.set_by: str | None = None

    def __iter__(self) -> Iterator[Lot]:
        return iter(self._lots.values())

    @property
    def fixed(self) -> Schema | None:
        """The schema that every sample of the run has; None while that is not decided."""
        return None if self.set_by is None else self.leading.schema

    @property
    def apart(self) -> list[Lot]:
        """The lots beside the one that leads."""
        return [lot for lot in self._lots.values() if lot is not self.leading]

    # -- which schemas are taken --------------------------------------------------------------

    def takes(self, schema: Schema) -> bool:
        """Whether samples of this schema may come in."""
        if schema is self.leading.schema or schema in self._lots:
            return True
        return self.set_by is None and len(self._lots) < MAX_SCHEMAS

    def refusal(self, sample: Sample) -> SampleRefused:
        """Why this sample may not; says how it differs."""
        about = f"sample {sample.sample_id} differs from"
        words = self.leading.schema.difference(sample.schema)
        if self.set_by is not None:
            about += f" the run's samples ({self.set_by}): {words}"
        else:
            about += (
                f" all samples that wait, which are of {MAX_SCHEMAS} schemas already; the first "
                f"step decides on one of them, as --fields would; most have another: {words}"
            )
        return SampleRefused("schema", about)

    def fix(self, schema: Schema, set_by: str | None = None) -> None:
        """The run has this schema; `apart` are those to be dropped. set_by: unless its lot says."""
        lot = self.of(schema, "")
        self.leading, self.set_by = lot, set_by or lot.set_by

    # -- what comes and goes --------------------------------------------------------------------

    def of(self, schema: Schema, producer: str) -> Lot:
        """The lot of this schema; where there is none, one that this producer begins."""
        leading = self.leading
        if leading.schema is schema:
            return leading
        lot = self._lots.get(schema)
        if lot is None:
            lot = self._lots[schema] = self._begin(schema, producer)
            self.lead()
        return lot

    def watch_versions(self) -> None:
        """Versions will be asked for in `ages`, of every lot."""
        self._watches = True
        for lot in {self.leading, *self}:
            lot.ages.watch(lot.ready.values())

    def _begin(self, schema: Schema, producer: str) -> Lot:
        lot = Lot(schema, producer, Ages(self._too_long, self._micro_batch))
        if self._watches:
            lot.ages.watch(())
        return lot

    def left(self, lot: Lot) -> None:
        """Samples of this lot have gone: without any it is none, unless it is the run's."""
        if not lot.samples and (self.set_by is None or lot is not self.leading):
            del self._lots[lot.schema]
        self.lead()

    def lead(self) -> bool:
        """Units have come or gone: see which lot leads; returns whether it is another."""
        before = self.leading
        is_left = self._lots.get(before.schema) is before
        if is_left and len(self._lots) == 1:
            return False
        if self.set_by is not None or before.units >= self._batch:
            return False
        leading = before if is_left else next(iter(self), self._begin(_NONE, ""))
        for lot in self._lots.values():
            leading = lot if lot.units > leading.units else leading
        self.leading = leading
        return self.leading is not before
