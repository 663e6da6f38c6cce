"""`StreamDataset`: a stream as trainers know their data, as an `IterableDataset` of a `DataLoader`.

A dataset has no steps, so it decides itself when to commit one: once all of the step at hand was
handed out, and the trainer asks for more, or for a state, which counts what was handed out, as
states of data loaders do.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from rollout_workers.step import Step
from rollout_workers.stream import MicroBatchStream


class StreamDataset(IterableDataset[Any]):
    """The micro-batches of every step of a stream, or items made of them, one after the other.

        dataset = StreamDataset(stream)
        for micro_batch in DataLoader(dataset, batch_size=None):

    of_step: what to hand out, made of all micro-batches of a step; default: those themselves. A
        trainer that counts micro-batches itself needs steps with equally many
        (`--micro-batch-size`, `last_batch=drop`): `lambda step: map(MicroBatch.as_hf, step)`. One
        that takes a whole step at once gets one item a step: `lambda step: [list(step)]`.

    With `num_workers=0`: a stream belongs to its process. Its items are this rank's part already,
    so do not divide them again: no `DistributedSampler`, no `accelerator.prepare`.

    A step is committed when the next one is asked for, so the optimizer's step has to be made
    before that; and by `state_dict` and `commit`. Iterating again goes on at the next step, or at
    the beginning of one that was left half-way. Raises the errors of the stream.

    stream: of the steps. step: the step at hand; None before the first, and once committed.
    """

    def __init__(
        self, stream: MicroBatchStream, of_step: Callable[[Step], Iterable[Any]] = iter
    ) -> None:
        self.stream, self._of_step = stream, of_step
        self.step: Step | None = None
        self._items = _Items(())

    def __iter__(self) -> Iterator[Any]:
        self.commit()
        while (step := self.step or next(self.stream, None)) is not None:
            self.step, self._items = step, _Items(self._of_step(step))
            yield from self._items
            if self.step is step:  # no state counts it so far
                step.commit()
                self.step = None

    def commit(self) -> None:
        """Commit the step at hand, if all that is made of it was handed out.

        For the end of training: of the last step nobody knows that no other is asked for.
        """
        if self.step is not None and self.step.handed_out and self._items.are_done:
            self.step.commit()
            self.step = None

    def state_dict(self) -> dict[str, int | str]:
        """The stream's state; it counts the step at hand if all of it was handed out.

        So ask for it after the optimizer's step. In the middle of a step it is the state before it.
        """
        self.commit()
        return self.stream.state_dict()

    def load_state_dict(
        self, state: Mapping[str, object], *, strict: bool = True, allow_lost_steps: bool = False
    ) -> None:
        """Go on after the step that the state was taken after; see `MicroBatchStream`."""
        self.stream.load_state_dict(state, strict=strict, allow_lost_steps=allow_lost_steps)


class _Items(Iterator[Any]):
    """The items of a step, with a check whether there is another."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._rest = iter(items)
        self._ahead: list[Any] = []

    def __next__(self) -> Any:
        return self._ahead.pop() if self._ahead else next(self._rest)

    @property
    def are_done(self) -> bool:
        """Whether none is left; takes the next one if there is, to be handed out later."""
        if not self._ahead:
            self._ahead.extend(islice(self._rest, 1))
        return not self._ahead
