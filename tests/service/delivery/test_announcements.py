"""What ranks are told of a step's groups, and the same after a reconnect."""

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


def test_ranks_know_the_loss_tokens_of_every_group_of_the_step(serve: Serve) -> None:
    server = serve(micro_batch_size=1)
    Producer(server.endpoint, "p").push([3, 4, 5, 6], loss_tokens=[1, 2, 4, 0], **GROUPS)
    first = Rank(server.endpoint, 0, 2)
    other = Rank(server.endpoint, 1, 2, generation=first.generation)
    for rank in (first, other):
        rank.demand(taken=-1)
    held = first.hold(0)
    for step in (held, other.hold(0)):
        assert (step.header.expected_loss_tokens, step.header.loss_tokens) == (7, 7)
        assert sorted(step.header.group_loss_tokens or ()) == [3, 4]
        assert weights(step) == {name: 4 if name == "p/2" else 3 for name in step.sample_ids}
    first.close()
    again = Rank(server.endpoint, 0, 2, generation=first.generation, client_id=first.client_id)
    repeated = again.hold(0)
    assert repeated.header == held.header
    assert [head for head, _ in repeated.micro_batches] == [head for head, _ in held.micro_batches]
