"""What trainers and their frameworks may do with a micro-batch."""

import copy
import importlib.util
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from rollout_dispatcher.errors import StepContractError
from rollout_dispatcher.sample import Sample
from rollout_workers.micro_batch.collate import CollateConfig
from rollout_workers.micro_batch.layouts import Collation
from rollout_workers.micro_batch.loss import LossConfig
from rollout_workers.micro_batch.micro_batch import MicroBatch
from tests.support.examples import examples
from tests.workers.micro_batch.batches import TWO, batch
from tests.workers.support.peers import sample, unmasked

PLAIN = CollateConfig(LossConfig(2))
LISTS = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=9), min_size=1, max_size=6)
#: Every way to lay the same samples out.
CONFIGS = st.one_of(
    st.builds(
        lambda multiple, extra: replace(
            PLAIN, sample_length_multiple=multiple, packed_length=extra and 6 * 16 + extra
        ),
        st.integers(1, 8),
        st.one_of(st.none(), st.integers(1, 9)),
    ),
    st.builds(
        lambda multiple: replace(
            PLAIN, collation=Collation.PADDED, sample_length_multiple=multiple
        ),
        st.integers(1, 8),
    ),
    st.just(replace(PLAIN, collation=Collation.JAGGED)),
)


def half_masked(ids: list[int]) -> Sample:
    """A sample whose odd tokens count."""
    return sample(ids, [token % 2 for token in ids])


def samples_of(found: MicroBatch, name: str) -> list[list[float]]:
    """A per-token tensor's values without padding, sample by sample."""
    if found.layout is Collation.JAGGED:
        return [row.tolist() for row in found[name].unbind()]
    flat = found[name].flatten()
    pairs = zip(found.placement.starts.tolist(), found.lengths, strict=True)
    return [flat[start : start + size].tolist() for start, size in pairs]


def pickled(found: MicroBatch) -> MicroBatch:
    """What another process gets."""
    again: MicroBatch = pickle.loads(pickle.dumps(found))
    return again


def padding_of(found: MicroBatch, name: str) -> Tensor:
    """What a per-token tensor has outside of the samples."""
    flat = found[name].flatten()
    rows = torch.ones(len(flat), dtype=torch.bool)
    rows[found.placement.rows_of_tokens] = False
    return flat[rows]


# -- a mapping and a pytree


def test_it_is_a_mapping_of_its_tensors() -> None:
    found = batch(*TWO)
    assert isinstance(found, Mapping)
    assert list(found) == list(found.keys()) == list(found.tensors)
    assert len(found) == len(found.keys()) == 6
    assert found.num_samples == 2
    assert dict(**found)["input_ids"] is found["input_ids"]
    assert found.get("values") is None
    assert "reward" in found
    assert "step" not in found
    with pytest.raises(KeyError, match="logprobs"):
        found["logprobs"]


@pytest.mark.parametrize("layout", list(Collation))
def test_what_is_put_in_goes_along(layout: Collation) -> None:
    found = batch(*TWO, config=replace(PLAIN, collation=layout, sample_length_multiple=4))
    shared = copy.copy(found)
    found["advantages"] = found["loss_weights"] * 2.0
    found["scores"] = torch.tensor([1.0, 2.0])
    assert samples_of(found, "advantages") == [[0, 2, 2], [0, 2]]
    for other in (found.as_packed(), found.as_padded(side="left"), found.as_jagged()):
        assert samples_of(other, "advantages") == [[0, 2, 2], [0, 2]]
        assert other.scores.tolist() == [1, 2]
    assert "advantages" not in shared
    del found["loss_mask"]
    assert samples_of(replace(found), "advantages") == [[0, 2, 2], [0, 2]]


def test_labels_follow_a_mask_that_is_replaced() -> None:
    found = batch(*TWO)
    assert found.labels.tolist() == [-100, 6, 7, -100, 9]
    found["loss_mask"] = torch.tensor([False, True, False, True, False])
    assert found.labels.tolist() == [-100, 6, -100, -100, -100]


def test_functions_are_mapped_over_its_tensors_and_the_facts_go_along() -> None:
    found = batch(*TWO)
    twice = pytree.tree_map(lambda tensor: tensor * 2, found)
    assert isinstance(twice, MicroBatch)
    assert twice.input_ids.tolist() == [10, 12, 14, 16, 18]
    assert (twice.sample_ids, twice.loss_scale, twice.step) == (("a", "b"), 2 / 3, 3)
    assert twice.placement is found.placement
    leaves, spec = pytree.tree_flatten({"batch": found})
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    again = pytree.tree_unflatten(leaves, spec)["batch"]
    assert again.tensors == found.tensors


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickled])
def test_it_is_copied_and_pickled(duplicate: Callable[[MicroBatch], MicroBatch]) -> None:
    found = duplicate(batch(*TWO))
    assert found.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert found.labels.tolist() == [-100, 6, 7, -100, 9]


def test_it_moves_to_another_device_as_a_whole() -> None:
    found = batch(*TWO).to("meta", non_blocking=True)
    assert {tensor.device.type for tensor in found.values()} == {"meta"}
    assert found.num_samples == 2


@pytest.mark.parametrize("casts", [{"dtype": torch.bfloat16}, {"device": torch.bfloat16}])
def test_a_type_is_given_to_floating_point_tensors_but_not_to_weights(
    casts: dict[str, torch.dtype],
) -> None:
    found = batch(*TWO).to(**casts)  # type: ignore[arg-type]
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "input_ids": torch.int64,
        "position_ids": torch.int64,
        "loss_mask": torch.bool,
        "cu_seqlens": torch.int32,
        "loss_weights": torch.float32,
        "reward": torch.bfloat16,
    }


# -- labels and padding


@given(LISTS, CONFIGS, st.booleans())
def test_padding_weighs_nothing_and_the_samples_are_all_there(
    lists: list[list[int]], config: CollateConfig, masked: bool
) -> None:
    makers = (
        sample(ids, [token % 2 for token in ids]) if masked else unmasked(ids) for ids in lists
    )
    found = batch(*makers, config=config)
    assert samples_of(found, "input_ids") == lists
    assert samples_of(found, "position_ids") == [list(range(len(ids))) for ids in lists]
    counts = [
        [float(at > 0 and (not masked or token % 2)) for at, token in enumerate(ids)]
        for ids in lists
    ]
    assert samples_of(found, "loss_weights") == counts
    assert found.labels is found.labels, "what is written into them stays"
    found["labels"] = found.labels
    assert samples_of(found, "labels") == [
        [token if counted else -100 for token, counted in zip(*pair, strict=True)]
        for pair in zip(lists, counts, strict=True)
    ]
    if found.layout is not Collation.JAGGED:
        for name, nothing in (("input_ids", 0), ("loss_weights", 0), ("labels", -100)):
            assert (padding_of(found, name) == nothing).all(), name


@given(LISTS, st.integers(1, 8), st.one_of(st.none(), st.integers(96, 130)))
def test_packed_segments_are_multiples_and_one_more_fills_the_length(
    lists: list[list[int]], multiple: int, length: int | None
) -> None:
    config = replace(PLAIN, sample_length_multiple=multiple, packed_length=length)
    found = batch(*map(unmasked, lists), config=config)
    edges = found.cu_seqlens.tolist()
    sizes = [-(-len(ids) // multiple) * multiple for ids in lists]
    assert [b - a for a, b in pairwise(edges)][: len(lists)] == sizes
    assert len(edges) - 1 - len(lists) == (length is not None and sum(sizes) < length)
    assert edges[-1] == len(found.input_ids) == (length or sum(sizes))
    assert found.max_seqlen == max(b - a for a, b in pairwise(edges))
    assert found.tokens == sum(map(len, lists))
    each = [torch.arange(b - a) for a, b in pairwise(edges)]
    assert torch.equal(found.position_ids, torch.cat(each)), "every segment is one sequence"
    if multiple > 1 or length:
        real = found.cu_seqlens_unpadded.diff().tolist()
        assert real == [*map(len, lists), 0][: len(edges) - 1]
    else:
        assert "cu_seqlens_unpadded" not in found


def test_more_than_the_packed_length_is_an_error_that_says_so() -> None:
    with pytest.raises(StepContractError, match=r"8 tokens, .* packed_length=7; make it with more"):
        batch(*TWO, config=replace(PLAIN, sample_length_multiple=4, packed_length=7))


# -- from layout to layout


@examples(50)
@given(LISTS, CONFIGS, st.sampled_from(["right", "left"]), st.integers(1, 8))
def test_every_layout_makes_every_other(
    lists: list[list[int]], config: CollateConfig, side: str, multiple: int
) -> None:
    samples = list(map(half_masked, lists))
    found, plain = batch(*samples, config=config), batch(*samples)
    packed = found.as_packed()
    assert list(packed) == list(plain)
    assert all(torch.equal(packed[name], plain[name]) for name in plain)
    padded = found.as_padded(side=side, multiple_of=multiple)
    width = padded.input_ids.shape[1]
    assert width == padded.max_seqlen == -(-max(map(len, lists)) // multiple) * multiple
    for row, mask, ids in zip(padded.input_ids, padded.attention_mask, lists, strict=True):
        there = slice(width - len(ids), None) if side == "left" else slice(len(ids))
        assert row[there].tolist() == ids == row[mask].tolist()
        assert mask[there].all()
        assert mask.sum() == len(ids)
    again = found.as_packed(multiple_of=multiple, length=6 * 16)
    asked = replace(PLAIN, sample_length_multiple=multiple, packed_length=6 * 16)
    expected = batch(*samples, config=asked)
    for tensors in (again, padded.as_packed(multiple_of=multiple, length=6 * 16)):
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert samples_of(padded.as_jagged(), "position_ids") == samples_of(found, "position_ids")
    assert torch.equal(padded.reward, plain.reward)


def test_what_cannot_be_laid_out_so_is_an_error() -> None:
    found = batch(*TWO)
    with pytest.raises(ValueError, match="5 tokens do not fit a packed length of 4"):
        found.as_packed(length=4)
    with pytest.raises(ValueError, match="'middle' is not a valid Side"):
        found.as_padded(side="middle")
    with pytest.raises(ValueError, match="multiple_of is 0; it must be at least 1"):
        found.as_padded(multiple_of=0)


def test_padded_is_in_memory_of_its_own() -> None:
    found = batch(sample([5, 6], [0, 1]))
    found.as_padded().input_ids[:] = -1
    assert found.input_ids.tolist() == [5, 6]


# -- as others have it


def test_what_a_hugging_face_model_gets() -> None:
    found = batch(*TWO, config=replace(PLAIN, packed_length=8)).as_hf()
    assert lists_of(found) == {
        "input_ids": [[5, 6, 7, 8, 9, 0, 0, 0]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 1, 2]],
        "labels": [[-100, 6, 7, -100, 9, -100, -100, -100]],
        "cu_seq_lens_q": [0, 3, 5, 8],
        "cu_seq_lens_k": [0, 3, 5, 8],
    }
    assert (found["max_length_q"], found["max_length_k"], found["use_cache"]) == (3, 3, False)
    assert lists_of(batch(*TWO).as_padded(side="left").as_hf()) == {
        "input_ids": [[5, 6, 7], [0, 8, 9]],
        "position_ids": [[0, 1, 2], [0, 0, 1]],
        "labels": [[-100, 6, 7], [-100, -100, 9]],
        "attention_mask": [[1, 1, 1], [0, 1, 1]],
    }
    assert batch(*TWO).as_jagged().as_hf().keys() == batch(*TWO).as_hf().keys()


def lists_of(values: dict[str, Tensor | int]) -> dict[str, object]:
    """Tensors as lists, without what is no tensor."""
    return {name: item.tolist() for name, item in values.items() if isinstance(item, Tensor)}


if importlib.util.find_spec("tensordict") is None:

    def test_a_tensordict_needs_its_package() -> None:
        with pytest.raises(ImportError, match=r"needs tensordict, .* pip install tensordict"):
            batch(*TWO).as_tensordict()

else:

    @pytest.mark.parametrize(("layout", "size"), [("packed", []), ("padded", [2]), ("jagged", [2])])
    def test_a_tensordict_has_a_sample_a_row_where_the_layout_has(
        layout: str, size: list[int]
    ) -> None:
        found = batch(*TWO, config=replace(PLAIN, collation=Collation(layout)))
        tensors = found.as_tensordict()
        assert list(tensors.batch_size) == size
        assert tensors["reward"].tolist() == [18.0, 17.0]
        assert tensors["input_ids"] is not None
