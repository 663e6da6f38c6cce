"""Micro-batches of several ranks: each row is on one of them, with what it predicts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from rollout_dispatcher.errors import ConfigError, ProtocolError
from rollout_dispatcher.payload import Reference
from rollout_dispatcher.protocol import assemble
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.slices import Slicing
from rollout_dispatcher.sample import DType, Field, Sample, Schema
from rollout_dispatcher.transport.memory import uninitialised
from rollout_workers.micro_batch.blocks import (
    Blocks,
    block_sum,
    gather_block,
    make_blocks,
    rows_in_block,
    with_next,
)
from rollout_workers.micro_batch.collate import CollateConfig, collate
from rollout_workers.micro_batch.layouts import Collation
from rollout_workers.micro_batch.loss import LossConfig
from rollout_workers.micro_batch.micro_batch import MicroBatch
from rollout_workers.process_group import Place
from rollout_workers.rank.held_steps import Received
from rollout_workers.rank.payload import cut, lay_out
from rollout_workers.stores.file import FileStore
from rollout_workers.stores.interface import Missing, PayloadStore, part_of
from rollout_workers.stores.registry import OpenedStores
from tests.workers.micro_batch.batches import HEADER, received
from tests.workers.support.peers import SCHEMA, arrived, sample
from tests.workers.support.stored import make_store, put

#: Of 11 and 3 tokens, of which the loss counts every other one.
SAMPLES = (
    sample(list(range(1, 12)), [0, 1] * 5 + [0], "a"),
    sample([21, 22, 23], [1, 0, 1], "b"),
)


def group_of(size: int) -> dist.ProcessGroup:
    """That nobody communicates in."""
    return dist.ProcessGroup(0, size)  # type: ignore[call-arg]


def config(group: Any, slicing: Slicing = Slicing.ZIGZAG, **options: Any) -> CollateConfig:
    return CollateConfig(LossConfig(2), blocks=Blocks({2: group, 4: group}, slicing), **options)


def sent(
    how: CollateConfig,
    size: int,
    rank: int,
    samples: tuple[Sample, ...] = SAMPLES,
    *,
    whole: bool = False,
) -> Received:
    """What that rank of the block gets: its slices, or the whole samples."""
    slicing = None if whole or how.blocks is None else how.blocks.slicing
    return received(
        b"".join(
            assemble.micro_batch(
                3, 1, samples, block=(size, rank), slicing=slicing,
                multiple=how.sample_length_multiple,
            )
        )
    )  # fmt: skip


def of_rank(how: CollateConfig, size: int, rank: int, *samples: Sample) -> MicroBatch:
    return collate(sent(how, size, rank, samples or SAMPLES), HEADER, how)


def whole(ranks: list[MicroBatch], name: str) -> list[float]:
    """The rows of all ranks in the order of the samples."""
    rows = torch.cat([rows_in_block(batch) for batch in ranks])
    assert sorted(rows.tolist()) == list(range(len(rows))), "each row is on one rank"
    return torch.cat([batch[name] for batch in ranks])[rows.argsort()].tolist()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("slicing", Slicing)
def test_the_slices_of_all_ranks_are_the_padded_samples(size: int, slicing: Slicing) -> None:
    how = config(group_of(size), slicing)
    ranks = [of_rank(how, size, rank) for rank in range(size)]
    ids, length = [*range(1, 12)], 2 * size
    first, second = (-(-tokens // length) * length for tokens in (11, 3))
    pads = [0] * (first - 11), [0] * (second - 3)
    assert whole(ranks, "input_ids") == [*ids, *pads[0], 21, 22, 23, *pads[1]]
    assert whole(ranks, "next_input_ids") == [*ids[1:], 0, *pads[0], 22, 23, 0, *pads[1]]
    assert whole(ranks, "position_ids") == [*range(first), *range(second)]
    weights = [1, 0] * 5 + [0] + pads[0] + [0, 1, 0] + pads[1]
    assert whole(ranks, "next_loss_weights") == weights
    assert sum(batch.tokens for batch in ranks) == 14
    assert [batch.owns_samples for batch in ranks] == [True] + [False] * (size - 1)
    for place, batch in enumerate(ranks):
        assert (batch.cp_size, batch.cp_rank) == (size, place)
        assert batch.cu_seqlens.tolist() == [0, first, first + second]
        assert batch.cu_seqlens_unpadded.tolist() == [0, 11, 14]
        assert batch.max_seqlen == first
        assert batch.lengths == (11, 3)
        assert batch["reward"].tolist() == [66.0, 66.0]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("slicing", Slicing)
@pytest.mark.parametrize("multiple", [1, 3])
def test_a_rank_that_was_sent_whole_samples_makes_the_same_of_them(
    size: int, slicing: Slicing, multiple: int
) -> None:
    how = config(group_of(size), slicing, sample_length_multiple=multiple)
    for rank in range(size):
        part, all_of_it = (sent(how, size, rank, whole=whole) for whole in (False, True))
        assert part.payload.nbytes < all_of_it.payload.nbytes
        found, expected = collate(part, HEADER, how), collate(all_of_it, HEADER, how)
        assert found.keys() == expected.keys()
        for name in expected:
            assert torch.equal(found[name], expected[name]), name
        assert (found.tokens, found.lengths) == (expected.tokens, expected.lengths)


@pytest.mark.parametrize("reads_parts", [True, False])
def test_ranks_fetch_their_slices_of_samples_in_stores(tmp_path: Path, reads_parts: bool) -> None:
    how, long = config(group_of(4)), sample(list(range(8_000)), [1] * 8_000, "long")
    store = make_store(f"file://{tmp_path / 'store'}")
    placed = (*put(store, "p.1/0", long), SAMPLES[0])
    stores = OpenedStores(lambda _: store if reads_parts else Whole(store))
    stores.allow([store.address])
    nbytes = []
    for rank in range(4):
        frame = assemble.micro_batch(3, 1, placed, block=(4, rank), slicing=Slicing.ZIGZAG)
        header, carried = arrived(frame)
        assert isinstance(header, m.MicroBatch)
        payload, parts = lay_out(SCHEMA, header, carried, uninitialised)
        references = [reference for reference in header.references(SCHEMA) if reference]
        before = bytes_read()
        assert stores.get_into(references, payload, parts) == [None]
        nbytes.append(bytes_read() - before)
        found = collate(Received(header, payload, cut(SCHEMA, header, payload)), HEADER, how)
        expected = of_rank(how, 4, rank, long, SAMPLES[0])
        assert found.keys() == expected.keys()
        for name in expected:
            assert torch.equal(found[name], expected[name]), name
    overhead = 600  # headers of files, the counter itself, and the token behind each piece
    if reads_parts:
        assert sum(nbytes) <= long.nbytes + 4 * overhead
        assert max(nbytes) <= long.nbytes / 4 + overhead
    else:
        assert min(nbytes) >= long.nbytes


class Whole(FileStore):
    """A store that returns whole objects alone."""

    def __init__(self, store: FileStore) -> None:
        super().__init__(store.address, store.root)

    get_into = PayloadStore.get_into

    def get(self, references: Sequence[Reference]) -> list[memoryview | Missing]:
        there = (self.root / references[0].stored.key).read_bytes()[-references[0].stored.nbytes :]
        return [part_of(memoryview(there), reference) for reference in references]


def bytes_read() -> int:
    """By this thread so far."""
    text = Path("/proc/thread-self/io").read_text()
    return int(text.split()[1])


def test_nothing_is_fetched_of_a_sample_that_has_no_token_for_a_rank(tmp_path: Path) -> None:
    schema = Schema((Field("input_ids", DType.INT64),))
    short = SAMPLES[1]._replace(schema=schema, payload=memoryview(bytes(24)))
    store = make_store(f"file://{tmp_path / 'store'}")
    stores = OpenedStores(lambda _: store)
    stores.allow([store.address])
    placed = put(store, "p.1/0", short)
    store.release(["p.1/0"])
    missing = []
    for rank in range(4):
        header, carried = arrived(
            assemble.micro_batch(3, 1, placed, block=(4, rank), slicing=Slicing.ZIGZAG)
        )
        assert isinstance(header, m.MicroBatch)
        payload, parts = lay_out(schema, header, carried, uninitialised)
        references = [reference for reference in header.references(schema) if reference]
        missing.append([bool(each) for each in stores.get_into(references, payload, parts)])
    assert missing == [[True], [True], [True], [False]]


def test_slices_for_another_padding_are_an_error() -> None:
    with pytest.raises(ProtocolError, match="another --set sample-length-multiple"):
        collate(
            sent(config(group_of(2)), 2, 0),
            HEADER,
            config(group_of(2), sample_length_multiple=3),
        )


def test_zigzag_gives_each_rank_a_piece_of_both_ends() -> None:
    ids = sample(list(range(8)), [0] * 8)
    ranks = {
        slicing: [
            of_rank(config(group_of(2), slicing), 2, rank, ids).input_ids.tolist()
            for rank in (0, 1)
        ]
        for slicing in Slicing
    }
    assert ranks == {
        Slicing.ZIGZAG: [[0, 1, 6, 7], [2, 3, 4, 5]],
        Slicing.CONTIGUOUS: [[0, 1, 2, 3], [4, 5, 6, 7]],
    }


def test_a_packed_length_and_a_multiple_are_of_each_ranks_rows() -> None:
    how = config(group_of(2), packed_length=20, sample_length_multiple=3)
    ranks = [of_rank(how, 2, rank) for rank in (0, 1)]
    assert [len(batch.input_ids) for batch in ranks] == [20, 20]
    assert ranks[1].cu_seqlens.tolist() == [0, 12, 24, 40]
    assert whole(ranks, "input_ids")[:13] == [*range(1, 12), 0, 21]


def test_a_micro_batch_of_one_rank_says_too_what_each_row_predicts() -> None:
    batch = of_rank(config(group_of(2)), 1, 0)
    assert batch.next_input_ids.tolist() == [*range(2, 12), 0, 22, 23, 0]
    assert batch.cu_seqlens_unpadded.tolist() == batch.cu_seqlens.tolist() == [0, 11, 14]
    assert (batch.cp_size, batch.cp_group, batch.owns_samples) == (1, None, True)
    assert block_sum(batch.next_loss_weights, batch).tolist() == [5, 1]


def test_a_sample_may_not_have_a_field_that_a_stream_makes() -> None:
    both = {"x": torch.arange(3), "next_x": torch.arange(3)}
    with pytest.raises(ConfigError, match="have a field next_x"):
        with_next(both, [3])
    labels = {"labels": torch.arange(3), "position_ids": torch.arange(3)}
    assert with_next(labels, [3]).keys() == labels.keys()


def test_slices_have_no_labels_and_no_other_layout() -> None:
    batch = of_rank(config(group_of(2)), 2, 1)
    for use in (lambda: batch.labels, batch.as_hf, batch.as_packed, batch.as_padded):
        with pytest.raises(ConfigError, match="2 DP ranks train together"):
            use()


def test_a_block_that_was_not_asked_for_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="of 2 DP ranks"):
        of_rank(CollateConfig(LossConfig(2), Collation.PACKED), 2, 0)


# -- over real groups ------------------------------------------------------------------------------


def test_sums_and_rows_over_a_block_have_the_gradient_of_one_process(tmp_path: Path) -> None:
    multiprocessing.spawn(_in_a_block, (str(tmp_path / "store"),), nprocs=3)  # type: ignore[attr-defined, no-untyped-call]


def _in_a_block(rank: int, store: str) -> None:
    """Ranks 0 and 1 are a block; rank 2 has no neighbour."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    with pytest.raises(ConfigError, match="DP rank 0 of 2, but rank"):
        make_blocks(Place(0, 2), None, 2, Slicing.ZIGZAG)
    with pytest.raises(ConfigError, match="in the order of their global ranks"):
        make_blocks(Place(rank, 3), [0, 2, 1], 2, Slicing.ZIGZAG)
    make_blocks(Place(rank, 3), None, 2, Slicing.ZIGZAG)  # those of an earlier generation
    blocks = make_blocks(Place(rank, 3), None, 2, Slicing.ZIGZAG)
    assert list(blocks.groups) == ([] if rank == 2 else [2])
    if rank < 2:
        random = np.random.default_rng(1)
        batch = of_rank(CollateConfig(LossConfig(2), blocks=blocks), 2, rank)
        every = torch.tensor(random.normal(size=(16, 3)), requires_grad=True)
        factors = torch.tensor(random.normal(size=(2, 16, 3)))
        own = every.detach()[rows_in_block(batch)].requires_grad_()
        gathered, sums = gather_block(own, batch), block_sum(own, batch)
        assert torch.equal(gathered, every)
        _loss(gathered, sums, factors[rank], owner=batch.owns_samples).backward()  # type: ignore[no-untyped-call]
        expected = torch.stack((every[:12].sum(0), every[12:].sum(0)))
        torch.testing.assert_close(sums, expected)
        torch.stack([
            _loss(every, expected, factors[at], owner=at == 0) for at in (0, 1)
        ]).sum().backward()  # type: ignore[no-untyped-call]  # fmt: skip
        assert every.grad is not None
        torch.testing.assert_close(own.grad, every.grad[rows_in_block(batch)])
    dist.destroy_process_group()


def _loss(rows: Tensor, sums: Tensor, factors: Tensor, *, owner: bool) -> Tensor:
    """Of one rank; what is once a sample counts on the owner."""
    ratios = (sums / 3).tanh()
    return (rows.exp() * factors * ratios.sum()).sum() + (ratios**2).sum() * owner


@pytest.mark.parametrize(
    ("max_split", "ranks", "message"),
    [(3, None, "by 2, 4, 8"), (2, None, "there is no process group")],
)
def test_blocks_that_cannot_be_are_refused(
    max_split: int, ranks: list[int] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_blocks(Place(0, 2), ranks, max_split, Slicing.ZIGZAG)
