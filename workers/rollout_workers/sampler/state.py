"""Where a sampler stands, and whether the state of another fits it."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index

from rollout_dispatcher.errors import ConfigError

#: Of the algorithm: a new number for each change that gives another order to the same arguments.
VERSION = 2


@dataclass(slots=True)
class Position:
    """Where an iteration stands; begun: whether there is an iteration, and not a mere beginning.

    yielded: indices that this rank had of the epoch. run: samples in a run in this epoch.
    """

    epoch: int
    run: int
    yielded: int = 0
    begun: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """How a sampler's epochs are divided; order: what else shapes it, by name."""

    samples: int
    batch_size: int
    dp_size: int
    drop_last: bool
    order: Mapping[str, int | str]

    @property
    def global_batch(self) -> int:
        """Samples of a step over all ranks."""
        return self.batch_size * self.dp_size

    @property
    def per_rank(self) -> int:
        """Indices that a rank yields in an epoch."""
        if self.drop_last:
            return self.samples // self.global_batch * self.batch_size
        return -(-self.samples // self.dp_size)

    def state_of(self, position: Position) -> dict[str, int | str]:
        """All of it in numbers and text, the same on all ranks."""
        return {
            "version": VERSION,
            "epoch": position.epoch,
            "yielded": position.yielded,
            "run": position.run,
            "batch_size": self.batch_size,
            "dp_size": self.dp_size,
            "samples": self.samples,
            "drop_last": int(self.drop_last),
            **self.order,
        }

    def position_in(self, state: Mapping[str, object]) -> Position:
        """The position that a state holds. Raises ConfigError if it is not of this order."""
        if not isinstance(state, Mapping):
            raise ConfigError(f"a sampler's state is a mapping, not {type(state).__name__}")
        own = self.state_of(Position(0, self.global_batch))
        lacking = sorted(own.keys() - state.keys())
        if lacking:
            raise ConfigError(
                f"the state lacks {', '.join(lacking)}; it is of an older version's sampler, whose "
                "order is another, or of something else: begin an epoch anew"
            )
        numbers = {name: _count(name, state[name]) for name in _COUNTS}
        self._refuse_another_order(own, state, numbers)
        return Position(numbers["epoch"], numbers["run"], self._yielded(numbers))

    def _refuse_another_order(
        self, own: Mapping[str, object], state: Mapping[str, object], numbers: Mapping[str, int]
    ) -> None:
        named = ["version", "samples", "drop_last", *self.order]
        said = [_difference(name, state[name], own[name]) for name in named]
        there = numbers["batch_size"] * numbers["dp_size"]
        if there != self.global_batch:
            said.append(
                f"batch_size {numbers['batch_size']} and dp_size {numbers['dp_size']}, this one "
                f"has {self.batch_size} and {self.dp_size}, which is another global batch"
            )
        if any(said):
            raise ConfigError(
                f"the state is of a sampler with {'; '.join(filter(None, said))}: its samples come "
                "in another order, in which no state of the other holds; begin an epoch anew"
            )
        if not numbers["run"] or self.global_batch % numbers["run"]:
            raise ConfigError(
                f"the state has runs of {numbers['run']} samples, of which no global batch of "
                f"{self.global_batch} is made; it is not as a sampler made it"
            )

    def _yielded(self, numbers: Mapping[str, int]) -> int:
        """As many of this rank as the state says of its own, in whole steps if ranks differ."""
        other = Shape(
            self.samples, numbers["batch_size"], numbers["dp_size"], self.drop_last, self.order
        )
        yielded = numbers["yielded"]
        if yielded > other.per_rank:
            raise ConfigError(
                f"the state says that {yielded} indices were yielded of an epoch of "
                f"{other.per_rank}; it is not as a sampler made it"
            )
        if other.dp_size == self.dp_size:
            return yielded
        if yielded == other.per_rank:
            return self.per_rank
        steps, inside = divmod(yielded, other.batch_size)
        if inside:
            raise ConfigError(
                f"the state is of dp_size {other.dp_size}, this one has {self.dp_size}, and it was "
                f"taken inside a step, after {inside} of {other.batch_size} samples of each rank; "
                "take states between steps to go on with another number of ranks"
            )
        return steps * self.batch_size


_COUNTS = ("epoch", "yielded", "run", "batch_size", "dp_size")


def _count(name: str, value: object) -> int:
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(
            f"the state's {name} is {value!r}, which is no number of anything; it is not as a "
            "sampler made it"
        )
    return number


def _difference(name: str, there: object, here: object) -> str:
    """In words; empty if there is none."""
    if there == here:
        return ""
    if name == "lengths":
        return "other lengths, or the same in another order"
    return f"{name} {there}, this one has {here}"
