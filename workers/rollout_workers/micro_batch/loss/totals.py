"""Totals of a step over all DP ranks: what the dispatcher has counted, and what ranks add up.

What ranks add up is one vector for all losses, of which every rank contributes its own samples'
part: for each loss the sum of weights and the number of samples that have any, then, if it heeds
groups and the step has any, the weights of each.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from torch import Tensor

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.protocol import messages as m
from rollout_workers.micro_batch.loss.config import MAIN, LossConfig, NamedLoss
from rollout_workers.micro_batch.loss.normalisers.base import FloatArray, Share, Totals
from rollout_workers.micro_batch.loss.weights import sample_weights

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
            if header.is_filler:
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
