"""A push while it is decided: which of its samples are, and what it holds of memory meanwhile."""

from dataclasses import dataclass, field
from operator import attrgetter

from rollout_dispatcher.core.effects import PushAnswered
from rollout_dispatcher.sample import Outcome, Sample

_VERSION = attrgetter("judged_version")


@dataclass(slots=True, eq=False)
class Push:
    """Samples `first_seq`, `first_seq + 1`, ... of one producer, as far as they are decided.

    producer: its client id; empty for a push that is never sent again under the same numbers.
    floor: this producer never again sends a number below it.
    named: sample ids were given by the user, so a repeat from any producer is a duplicate.
    refers: whether some of the samples lie in payload stores.
    excused: it was here before what it belongs to was ended, and may come in nevertheless.
    """

    producer: str
    first_seq: int
    samples: tuple[Sample, ...]
    floor: int = 0
    named: bool = False
    refers: bool = False
    outcomes: list[Outcome | None] = field(init=False)
    errors: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    excused: bool = False

    def __post_init__(self) -> None:
        self.outcomes = [None] * len(self.samples)

    @property
    def numbers(self) -> range:
        """The samples' sequence numbers."""
        return range(self.first_seq, self.first_seq + len(self.samples))

    @property
    def undecided(self) -> list[int]:
        """Indices of the samples that wait."""
        return [index for index, outcome in enumerate(self.outcomes) if outcome is None]

    @property
    def waiting(self) -> list[Sample]:
        """The samples that wait."""
        return [self.samples[index] for index in self.undecided]

    @property
    def is_decided(self) -> bool:
        """Whether no sample waits."""
        return all(self.outcomes)

    @property
    def given_ids(self) -> tuple[str, ...]:
        """The samples' ids, if the user gave them."""
        return tuple(sample.sample_id for sample in self.samples) if self.named else ()

    def answer(self) -> PushAnswered:
        """The outcomes, in the order of the samples."""
        outcomes = tuple(filter(None, self.outcomes))
        versions = set(map(_VERSION, self.samples)) - {None}
        oldest = min(versions, default=None)
        return PushAnswered(
            self.producer, self.first_seq, outcomes, self.errors, oldest, self.reasons
        )
