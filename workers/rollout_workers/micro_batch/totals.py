"""Totals of a step over all DP ranks: what the dispatcher has counted, and what ranks add up.

What ranks add up is one vector for all losses, of which every rank contributes its own samples'
part: for each loss the sum of weights and the number of samples that have any, then, if it heeds
groups and the step has any, the weights of each.

It is added up by a collective that every rank leaves with the same, or with an error. What can fail
on one rank is computed before, and told to the others where they wait:

    compute --> all_gather [length or failed, what, words] --> all agree --> all_reduce float64
                                    |
                                    +--> one failed, or they differ: all raise

A rank waits without being deaf: what ends its stream meanwhile, as the loss of another rank does,
ends the wait.
"""

from collections.abc import Callable, Iterable, Mapping
from struct import Struct
from time import monotonic, sleep
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rollout_dispatcher.errors import ConfigError, PeerFailed
from rollout_dispatcher.protocol import messages as m
from rollout_workers.micro_batch.loss import (
    MAIN,
    FloatArray,
    LossConfig,
    NamedLoss,
    Share,
    Totals,
    sample_weights,
)
from rollout_workers.process_group import MESSAGE_BYTES, Place, device_of, initialised

#: What the fields with weights say of every token, [total], by their names.
Values = Mapping[str, Tensor]


class StepTotals:
    """The totals of every loss of one step; those that the dispatcher has not counted, once known.

    Raises ConfigError where the step's samples have no weights for a loss.
    """

    def __init__(self, header: m.StepHeader, config: LossConfig) -> None:
        self.losses, self._uncounted = config.losses, config.uncounted
        for loss in self.losses:
            _check_fields(loss, header)
        self._header, self._config = header, config
        self._counted = Totals(
            header.num_samples,
            header.loss_tokens,
            header.loss_samples,
            _array(header.group_loss_tokens),
            header.expected_loss_tokens,
        )
        self._found: dict[str, Totals] = {}
        self._scales: dict[str, float] = {}

    def __getitem__(self, loss: NamedLoss) -> Totals:
        return self._counted if loss.is_counted else self._found[loss.name]

    @property
    def are_known(self) -> bool:
        """Whether no rank has to add anything up any more."""
        return len(self._found) == len(self._uncounted)

    @property
    def scales(self) -> Mapping[str, float]:
        """The factor of every loss, by name."""
        if not self._scales:
            self._scales = {loss.name: self._scale(loss) for loss in self.losses}
        return self._scales

    def _scale(self, loss: NamedLoss) -> float:
        denominator = loss.normaliser.denominator(self[loss])
        return self._config.scale(denominator, self._header.num_micro_batches)

    # -- what ranks add up

    def local(self, micro_batches: Iterable[tuple[m.MicroBatch, Values]]) -> FloatArray:
        """This rank's part, from all of its micro-batches and their values by field.

        Raises SampleRefused where a weight is none.
        """
        losses = self._uncounted
        parts = {loss.name: np.zeros(self._size(loss)) for loss in losses}
        for header, values in micro_batches:
            if header.is_filler or header.cp_rank:  # the first rank of a block has said it
                continue
            for loss in losses:
                found = sample_weights(loss, header, values[loss.field])
                part = parts[loss.name]
                part[:2] += found.sum(), np.count_nonzero(found)
                if len(part) > 2 and header.group_numbers is not None:
                    np.add.at(part[2:], header.group_numbers, found)
        return np.concatenate(list(parts.values()))

    def know(self, total: FloatArray) -> None:
        """All ranks' parts have been added up."""
        at = 0
        for loss in self._uncounted:
            size = self._size(loss)
            weight, samples, *_ = part = total[at : at + size]
            groups = part[2:] if size > 2 else None
            self._found[loss.name] = Totals(
                self._header.num_samples, float(weight), round(samples), groups
            )
            at += size

    def _size(self, loss: NamedLoss) -> int:
        groups = self._header.group_loss_tokens if loss.normaliser.share is Share.GROUP else None
        return 2 + len(groups or ())


def _check_fields(loss: NamedLoss, header: m.StepHeader) -> None:
    fields = header.schema_.by_name
    field = fields.get(loss.field)
    if not loss.is_counted and (field is None or not field.per_token or field.shape):
        found = "the samples have no such field" if field is None else f"it is {field}"
        raise ConfigError(
            f"the weights of loss {loss.name!r} are in {loss.field}, one number a token, but "
            f"{found}; rollout workers push it beside input_ids"
        )
    if loss.name != MAIN and loss.weights in fields:
        raise ConfigError(
            f"the samples have a field {loss.weights}, which is what a micro-batch calls the "
            f"weights of loss {loss.name!r}; give one of them another name"
        )


def _array(values: list[int] | None) -> FloatArray | None:
    return None if values is None else np.array(values, np.float64)


#: How long a rank's part of a total is, and a checksum of what it is of.
_HEAD = Struct("!qI")
#: Of the part of a rank that failed.
_FAILED = -1
#: How long a rank that has failed waits for the others to hear why.
PATIENCE_S = 10.0
#: Between two looks at whether the others have come: from the first to the second.
POLLS_S = 20e-6, 2e-3


def require_group(what: str, place: Place, group: dist.ProcessGroup | None) -> None:
    """Raise ConfigError if there is no process group of exactly the DP ranks to add up in."""
    if place.dp_size == 1:
        return
    need = f"{what} takes a total over {place.dp_size} DP ranks"
    if not initialised():
        raise ConfigError(
            f"{need}, and there is no process group to add it up in: call "
            "torch.distributed.init_process_group() before the stream is made"
        )
    here = Place(dist.get_rank(group), dist.get_world_size(group))
    if here != place:
        which = "the default process group" if group is None else "process_group"
        raise ConfigError(
            f"{need}: this is DP rank {place.dp_rank}, but rank {here.dp_rank} of {here.dp_size} "
            f"in {which}; pass process_group= with the DP ranks in their order"
        )


class RankTotals:
    """Adds up over the DP ranks of one stream.

    check: raises what has ended the stream for good.
    """

    def __init__(
        self, place: Place, group: dist.ProcessGroup | None, check: Callable[[], None]
    ) -> None:
        self._place, self._group, self._check = place, group, check

    def total(self, what: str, local: Callable[[], FloatArray]) -> FloatArray:
        """The sum of what every rank has, float64 of the same length; call it on every DP rank.

        what: the same on all of them, or they differ. Raises what `local` raises, PeerFailed where
        another rank's failed or is of another length, and what ended the stream.
        """
        if self._place.dp_size == 1:
            return local()
        require_group(what, self._place, self._group)
        try:
            values = np.asarray(local(), np.float64)
        except Exception as error:
            until = monotonic() + PATIENCE_S

            def patience(error: Exception = error) -> None:
                if monotonic() > until:
                    raise error

            self._gathered(what, _FAILED, f"failed: {type(error).__name__}: {error}", patience)
            raise
        said = self._gathered(what, len(values), f"takes {what} ({len(values)} long)", self._check)
        self._agree(what, said)
        total = torch.from_numpy(values.copy()).to(device_of(self._group))
        self._wait(dist.all_reduce(total, group=self._group, async_op=True), self._check)
        found: FloatArray = total.cpu().numpy()
        return found

    def _agree(self, what: str, said: list[bytes]) -> None:
        """Raise PeerFailed where one failed, or they do not take the same."""
        heads = [row[: _HEAD.size] for row in said]
        if len(set(heads)) == 1:
            return
        failed = [rank for rank, head in enumerate(heads) if _HEAD.unpack(head)[0] == _FAILED]
        words = [row[_HEAD.size :].rstrip(b"\0").decode(errors="replace") for row in said]
        told = "; ".join(f"DP rank {rank} {words[rank]}" for rank in failed or range(len(words)))
        if failed:
            raise PeerFailed(f"{what}: {told}")
        raise PeerFailed(f"the DP ranks do not take the same total: {told}")

    def _gathered(
        self, what: str, length: int, words: str, check: Callable[[], None]
    ) -> list[bytes]:
        """What each rank says: how long its part is, of what, and in words."""
        head = _HEAD.pack(length, crc32(what.encode()))
        own = head + words.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
        row = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device_of(self._group))
        rows = [torch.empty_like(row) for _ in range(self._place.dp_size)]
        self._wait(dist.all_gather(rows, row, group=self._group, async_op=True), check)
        return [bytes(each.cpu().numpy()) for each in rows]

    def _wait(self, work: dist.Work | None, check: Callable[[], None]) -> None:
        assert work is not None, "this rank is in the group"
        pause, longest = POLLS_S
        while not work.is_completed():
            check()
            sleep(pause)
            pause = min(2 * pause, longest)
        work.wait()
