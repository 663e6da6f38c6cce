"""Several losses of a step: their weights and scales, whatever the cut, and what is refused."""

from collections.abc import Sequence
from itertools import count
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.protocol import assemble
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import DType, Field, Sample, Schema
from rollout_dispatcher.spans import join
from rollout_workers.micro_batch.collate import CollateConfig, collate
from rollout_workers.micro_batch.layouts import Collation
from rollout_workers.micro_batch.loss import (
    WORDS,
    GradReduction,
    LossConfig,
    divisor,
    loss_scales,
    named_losses,
    normaliser,
)
from rollout_workers.micro_batch.micro_batch import MicroBatch
from tests.support.source import ROOT
from tests.workers.micro_batch.batches import received
from tests.workers.normalisers.losses import FORMULAS, Counted
from tests.workers.support.peers import arrived

SCHEMA = Schema(
    (
        Field("input_ids", DType.INT64),
        Field("loss_mask", DType.BOOL),
    )
)
#: Every normaliser that needs no more than the step, by its word as a name.
NAMED = {
    word.partition(":")[0].replace("-", "_"): word.replace("NUMBER", "4")
    for word in WORDS
    if word != "token-mean-expected"
}
#: Loss tokens that each step is expected to have.
EXPECTED = 10


def sample(weights: Sequence[float], group: str | None = None, name: str = "s") -> Sample:
    """A first token that is marked and never counts, then tokens of these weights, 0 or 1.

    Its ids are 1, 2, 3, ...
    """
    mask = np.array([1.0, *weights]) > 0
    size = len(mask)
    span = memoryview(join((np.arange(1, size + 1).tobytes(), mask.tobytes())))
    return Sample(name, size, int(mask[1:].sum()), SCHEMA, span, group)


class Dispatched:
    """Samples as a step of micro-batches; with groups where a sample has one."""

    def __init__(self, parts: Sequence[Sequence[Sample]]) -> None:
        samples = [one for part in parts for one in part]
        known: dict[str, int] = {}
        fresh = count()
        numbers = [
            [known.setdefault(s.group_id, next(fresh)) if s.group_id else next(fresh) for s in part]
            for part in parts
        ]
        totals = [0] * next(fresh)
        for part, given_ in zip(parts, numbers, strict=True):
            for one, number in zip(part, given_, strict=True):
                totals[number] += one.loss_tokens
        grouped = bool(known)
        frame = assemble.step_header(
            0, "d", len(parts), samples,
            group_loss_tokens=totals if grouped else None, expected_loss_tokens=EXPECTED,
        )  # fmt: skip
        header, _ = arrived(frame)
        assert isinstance(header, m.StepHeader)
        self.header = header
        self.received = [
            received(
                b"".join(assemble.micro_batch(0, i, part, number if grouped else None)), SCHEMA
            )
            for i, (part, number) in enumerate(zip(parts, numbers, strict=True))
        ]

    def collated(self, config: CollateConfig) -> list[MicroBatch]:
        """Every micro-batch, as if each were on a rank of its own."""
        return [collate(one, self.header, config) for one in self.received]


def config(losses: dict[str, str], main: str = "token-mean", **options: object) -> CollateConfig:
    dtype = options.pop("weights_dtype", torch.float64)
    others = named_losses(losses)
    loss = LossConfig(1, normaliser("", main), weights_dtype=dtype, others=others)  # type: ignore[arg-type]
    return CollateConfig(loss, **options)  # type: ignore[arg-type]


# -- what they add up to


def expected(name: str, found: Sequence[tuple[object, list[float]]]) -> float:
    """The formula of a loss, of samples' groups and weights; 0 where there is no weight.

    The token losses of each are 1, 2, 3, ..., of its second on.
    """
    if not any(sum(weights) for _, weights in found):
        return 0.0
    word, _, number = NAMED[name].partition(":")
    counted: Counted = [
        (f"{group}", torch.arange(2, len(weights) + 2).double(), torch.tensor(weights).double())
        for group, weights in found
    ]
    return float(FORMULAS[word](counted, float(number or 0)))


WEIGHTS = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=5)
SAMPLES = st.lists(st.tuples(st.sampled_from([None, "g", "h"]), WEIGHTS), min_size=1, max_size=8)


@given(SAMPLES, st.randoms(use_true_random=False))
def test_however_a_step_is_cut_every_loss_is_that_of_one_batch(
    given_: list[tuple[str | None, list[float]]], random: Random
) -> None:
    parts: list[list[Sample]] = [[] for _ in range(4)]
    for at, (group, weights) in enumerate(given_):
        random.choice(parts).append(sample(weights, group, f"s{at}"))
    batches = Dispatched([part for part in parts if part]).collated(config(NAMED))
    alone = [(group or at, weights) for at, (group, weights) in enumerate(given_)]
    for name in NAMED:
        losses = [
            (one.position_ids + 1.0).mul(one[f"{name}_weights"]).sum() * one.loss_scales[name]
            for one in batches
        ]
        found = float(torch.stack(losses).sum())
        assert found == pytest.approx(expected(name, alone), rel=1e-12, abs=1e-12), name


def test_what_is_expected_of_a_step_divides_its_loss_whatever_it_has() -> None:
    for parts in ([[sample([1])], [sample([1, 1], name="t")]], [[sample([1] * 7)]]):
        for one in Dispatched(parts).collated(config({}, "token-mean-expected")):
            assert one.loss_scale == 1 / EXPECTED
            assert one.loss_weights.sum() == one.loss_mask.sum()


@pytest.mark.parametrize("layout", list(Collation))
def test_weights_have_the_layout_and_the_type_of_the_others(layout: Collation) -> None:
    settings = config({"kl": "sequence-mean"}, collation=layout, weights_dtype=torch.bfloat16)
    (one,) = Dispatched([[sample([1, 1]), sample([1])]]).collated(settings)
    assert one.kl_weights.dtype is torch.bfloat16
    assert one.to(torch.float16).kl_weights.dtype is torch.bfloat16
    values = one.kl_weights.values() if layout is Collation.JAGGED else one.kl_weights
    padded = [[0, 0.5, 0.5], [0, 1, 0]]
    assert values.tolist() == (padded if layout is Collation.PADDED else [0, 0.5, 0.5, 0, 1])


def test_a_filler_weighs_nothing_in_any_loss() -> None:
    step = Dispatched([[sample([1.0, 1.0])]])
    step.received.append(received(b"".join(assemble.filler(0, 1, sample([1.0]))), SCHEMA))
    whole, filler = step.collated(config({"kl": "token-mean"}))
    assert filler.kl_weights.tolist() == filler.loss_mask.tolist() == [0]
    assert whole.loss_scales["kl"] == 1 / 2


# -- scales


def test_the_documents_have_every_normaliser() -> None:
    text = (ROOT / "docs" / "losses.md").read_text()
    assert [word for word in WORDS if f"| `{word.replace('NUMBER', 'C')}` |" not in text] == []


def test_what_the_trainer_averages_and_divides_by_is_made_good() -> None:
    assert LossConfig(4).scale(8, 3) == 4 / 8
    assert LossConfig(4, grad_reduction=GradReduction.SUM).scale(8, 3) == 1 / 8
    assert LossConfig(4, divides_by=divisor("micro-batches")).scale(8, 3) == 4 * 3 / 8
    assert LossConfig(4, divides_by=divisor(5)).scale(8, 3) == 4 * 5 / 8
    assert LossConfig(4).scale(0.0, 3) == 0.0


# -- what is refused


UNKNOWN = f"choose from {', '.join(WORDS)}"
NAMELESS = "choose a name like a variable's"


@pytest.mark.parametrize(
    ("name", "word", "complaint"),
    [
        *(("kl", f"constant{number}", "write a positive number after the colon")
          for number in ("", ":", ":0", ":x", ":inf")),
        *(("kl", word, UNKNOWN) for word in ("mean", "token-mean:3", "", None)),
        *((name, "token-mean", NAMELESS) for name in ("loss", "k l", "", 3)),
    ],
)  # fmt: skip
def test_what_is_no_loss_is_refused(name: object, word: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        named_losses({name: word})  # type: ignore[dict-item]


@pytest.mark.parametrize("given_", ["steps", 0, -1, 1.5, True, None])
def test_what_a_trainer_cannot_divide_by_is_refused(given_: object) -> None:
    with pytest.raises(ConfigError, match=r"trainer_divides_by is .*; it is 'micro-batches', or"):
        divisor(given_)


def test_a_field_that_a_losss_weights_would_hide_is_an_error() -> None:
    header = Dispatched([[sample([1.0])]]).header
    taken = m.FieldHeader(name="kl_weights", dtype=DType.FLOAT32)
    header = header.model_copy(update={"fields": [*header.fields, taken]})
    with pytest.raises(ConfigError, match="have a field kl_weights, which is what a micro-batch"):
        loss_scales(header, config({"kl": "token-mean"}).loss)
