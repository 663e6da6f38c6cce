"""What ranks are told of a step's groups, and the same after a reconnect."""

import os
from pathlib import Path
from signal import SIGKILL
from typing import Any

from tests.service.conftest import Serve
from tests.support.client import HeldStep, Producer, Rank

GROUPS: dict[str, Any] = {"group_ids": ["g", "g", None, "g"], "group_sizes": [3, 3, 1, 3]}


def weights(step: HeldStep) -> dict[str, int | None]:
    """The loss tokens of each sample's group, as far as the rank is told."""
    totals = step.header.group_loss_tokens
    return {
        name: totals[number]
        for head, _ in step.micro_batches
        if totals is not None and not head.is_filler
        for name, number in zip(head.sample_ids, head.group_numbers or (), strict=True)
    }


def untold(step: HeldStep) -> bool:
    told = [step.header.group_loss_tokens, *(head.group_numbers for head, _ in step.micro_batches)]
    return told == [None] * len(told)


def test_ranks_know_the_loss_tokens_of_every_group_of_the_step(serve: Serve) -> None:
    server = serve(micro_batch_size=1)
    Producer(server.endpoint, "p").push([3, 4, 5, 6], loss_tokens=[1, 2, 3, 0], **GROUPS)
    first = Rank(server.endpoint, 0, 2)
    other = Rank(server.endpoint, 1, 2, generation=first.generation)
    for rank in (first, other):
        rank.demand(taken=-1)
    held = first.hold(0)
    for step in (held, other.hold(0)):
        assert sorted(step.header.group_loss_tokens or ()) == [3, 3]
        assert weights(step) == dict.fromkeys(step.sample_ids, 3)
    first.close()
    again = Rank(server.endpoint, 0, 2, generation=first.generation, client_id=first.client_id)
    repeated = again.hold(0)
    assert repeated.header == held.header
    assert [head for head, _ in repeated.micro_batches] == [head for head, _ in held.micro_batches]


def test_where_no_sample_has_a_group_nothing_is_told(serve: Serve) -> None:
    server = serve(dp_size=1)
    Producer(server.endpoint, "p").push([3] * 4)
    rank = Rank(server.endpoint, 0, 1)
    rank.demand(taken=-1)
    assert untold(rank.hold(0))


def test_a_filler_is_in_no_group(serve: Serve) -> None:
    server = serve(global_batch_size=3, micro_batch_tokens=3)
    Producer(server.endpoint, "p").push([3] * 3, group_ids=["g"] * 3, group_sizes=[3] * 3)
    first = Rank(server.endpoint, 0, 2)
    other = Rank(server.endpoint, 1, 2, generation=first.generation)
    for rank in (first, other):
        rank.demand(taken=-1)
    heads = [head for rank in (first, other) for head, _ in rank.hold(0).micro_batches]
    numbers = [head.group_numbers for head in heads]
    assert [None if head.is_filler else [0] for head in heads] == numbers
    assert numbers.count(None) == 1


def test_ranks_are_told_what_to_expect_and_the_same_after_a_kill(
    serve: Serve, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"journal_dir": tmp_path / "journal", "global_batch_size": 3}
    settings["dp_size"] = 1
    server = serve(**settings)
    Producer(server.endpoint, "p").push([3, 4, 40], loss_tokens=[1, 3, 3])
    rank = Rank(server.endpoint, 0, 1)
    rank.demand(taken=-1)
    held = rank.hold(0).header
    assert (held.expected_loss_tokens, held.loss_tokens) == (7, 7)
    os.kill(server.pid, SIGKILL)
    server = serve(**settings)
    again = Rank(server.endpoint, 0, 1)
    again.demand(taken=-1)
    assert again.hold(0).header == held
