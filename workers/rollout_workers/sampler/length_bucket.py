"""`LengthBucketSampler`: balance for offline data, by giving all ranks samples of like length.

Where samples are produced while training goes on there is nothing to sort beforehand: that is what
the dispatcher's window is for. Which samples come when is `order.py`'s, what a state holds
`state.py`'s.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from operator import index
from typing import Any

from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Sampler

from rollout_dispatcher.errors import ConfigError, UnequalPartitions
from rollout_planner.public.arguments import as_lengths
from rollout_planner.types import IntArray
from rollout_workers.process_group import find_place
from rollout_workers.replica.places import place_in, refuse_contradiction
from rollout_workers.sampler.order import EpochOrder
from rollout_workers.sampler.state import Position, Shape


class LengthBucketSampler(Sampler[int]):
    """Indices of this DP rank, in epochs; for `DataLoader(sampler=..., batch_size=...)`.

    lengths: tokens of each sample, one entry a sample of the dataset.
    batch_size: samples that one rank takes in one step.
    micro_batch_size: samples that one rank takes at once, a part of batch_size without remainder;
        where they are padded to each other, as many as are. These are of like length, on all ranks.
    bucket_batches: global batches in a bucket. With 1 the samples of a step are all of like length;
        the more, the more a step's lengths are as the data's. None: all data are one bucket.
    dp_rank, dp_size: default: of the process group or the environment, else a single process.
    mesh, dp_dims: the trainer's device mesh and the names of its data-parallel dimensions, in place
        of these; ranks of one model replica draw the same indices.
    seed, shuffle: an epoch's order depends on the seed and the epoch's number; with shuffle=False
        all epochs are alike, and the longest come first.
    longest_first: begin each epoch with the step that has its longest sample, so that memory that
        does not suffice shows at once.
    drop_last: leave out samples that do not fill a last global batch, others in each epoch, rather
        than repeat some of the shortest so that all ranks get equally many.

    Every rank must use the same arguments.

    Each iterator yields a whole epoch, whatever became of others; once all of an epoch was yielded
    the next iterator begins the next one. Only the first iterator after `load_state_dict` goes on
    in the middle. An iterator begins when it is first asked for an index.

    The state is where the latest iterator stands, or what was loaded or set since, the same on all
    ranks. It counts what was yielded, which with a prefetching DataLoader is ahead of what was
    trained on; torchdata's StatefulDataLoader asks in time. Raises ConfigError.
    """

    def __init__(
        self,
        lengths: Iterable[int] | NDArray[Any],
        *,
        batch_size: int,
        micro_batch_size: int = 1,
        bucket_batches: int | None = 16,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        mesh: DeviceMesh | None = None,
        dp_dims: str | Sequence[str] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        longest_first: bool = True,
        drop_last: bool = False,
    ) -> None:
        refuse_contradiction(mesh, dp_dims, dp_rank, dp_size)
        place = find_place(dp_rank, dp_size, None) if mesh is None else place_in(mesh, dp_dims).dp
        batch_size = _at_least("batch_size", batch_size, 1)
        micro_batch_size = _at_least("micro_batch_size", micro_batch_size, 1)
        if bucket_batches is not None:
            bucket_batches = _at_least("bucket_batches", bucket_batches, 1)
        seed = _at_least("seed", seed, 0)
        if batch_size % micro_batch_size:
            raise ConfigError(
                f"batch_size {batch_size} is no multiple of micro_batch_size {micro_batch_size}; "
                "a rank's step is whole micro-batches"
            )
        tokens = _tokens(lengths)
        self._dp_rank = place.dp_rank
        self._run = micro_batch_size * place.dp_size
        self._order = EpochOrder(
            tokens,
            global_batch=batch_size * place.dp_size,
            bucket_batches=bucket_batches,
            seed=seed,
            shuffle=bool(shuffle),
            longest_first=bool(longest_first),
            drop_last=bool(drop_last),
        )
        shaping: dict[str, int | str] = {
            "seed": seed,
            "shuffle": int(bool(shuffle)),
            "longest_first": int(bool(longest_first)),
            "bucket_batches": bucket_batches or 0,
            "lengths": blake2b(tokens.astype("<i8").tobytes(), digest_size=8).hexdigest(),
        }
        self._shape = Shape(tokens.size, batch_size, place.dp_size, bool(drop_last), shaping)
        if not self._shape.per_rank:
            raise ConfigError(
                f"{tokens.size} lengths make no batch of {batch_size} samples on each of "
                f"{place.dp_size} DP ranks; lower batch_size or set drop_last=False"
            )
        self._position = Position(0, self._run)

    @property
    def epoch(self) -> int:
        """The epoch at hand, from 0."""
        return self._position.epoch

    def __len__(self) -> int:
        """Indices that this rank yields in an epoch."""
        return self._shape.per_rank

    def __iter__(self) -> Iterator[int]:
        """An epoch: from where a loaded state stood, else all of it."""
        position = self._begin()
        dp_size = self._shape.dp_size
        indices = self._order.of_rank(position.epoch, position.run, self._dp_rank, dp_size)
        for found in indices[position.yielded :].tolist():
            position.yielded += 1
            yield found
        if position is self._position:  # else another one is counted by now
            self._position = Position(position.epoch + 1, self._run)

    def _begin(self) -> Position:
        """The position of a new iterator, which is counted from now on."""
        latest = self._position
        if latest.begun:
            over = latest.yielded == len(self)
            self._position = Position(latest.epoch + over, self._run)
        self._position.begun = True
        return self._position

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch at the next iteration; epochs follow each other without it.

        The epoch of a state that was loaded goes on where it stood.
        """
        epoch = _at_least("epoch", epoch, 0)
        over = self._position.begun and self._position.yielded == len(self)
        if epoch != self.epoch or over:
            self._position = Position(epoch, self._run)

    def state_dict(self) -> dict[str, int | str]:
        """Where the latest iterator stands, and what its order depends on; of any rank for all."""
        return self._shape.state_of(self._position)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where another sampler stood, in the next iteration.

        The number of ranks may be another if the global batch is the same, between two steps.
        Raises ConfigError for any other difference, and changes nothing then.
        """
        self._position = self._shape.position_in(state)


def _at_least(name: str, value: int, least: int) -> int:
    try:
        number = index(value)
    except TypeError:
        raise ConfigError(f"{name} {value!r} is not a whole number") from None
    if number < least:
        raise ConfigError(f"{name} {number} must be at least {least}")
    return number


def _tokens(lengths: Iterable[int] | NDArray[Any]) -> IntArray:
    """Int64[n], a copy: who changes theirs later does not change the order."""
    try:
        return as_lengths(lengths)
    except UnequalPartitions as error:
        raise ConfigError(str(error)) from None
