"""Groups that stay together, seen from outside: real processes, real sockets."""

from collections import defaultdict

import pytest

from tests.service.conftest import Serve
from tests.support.client import HeldStep, Producer, Trainer

#: Tokens of the samples of four groups, which come interleaved.
TOKENS = [9, 3, 8, 2, 9, 3, 8, 2, 9, 3, 8, 2]
IDS = ["a", "b", "c", "d"] * 3


def homes(parts: list[HeldStep], name: str) -> dict[str, set[tuple[int, int]]]:
    """DP rank and micro-batch of the samples of each group."""
    found: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for rank, part in enumerate(parts):
        for head, _ in part.micro_batches:
            for sample in [] if head.is_filler else head.sample_ids:
                found[IDS[int(sample.removeprefix(f"{name}/"))]].add((rank, head.index))
    return dict(found)


@pytest.mark.parametrize("micro_batches", [{"micro_batch_size": 6}, {"micro_batch_tokens": 36}])
def test_a_group_is_in_one_micro_batch_where_asked(
    serve: Serve, micro_batches: dict[str, int]
) -> None:
    server = serve(
        dp_size=2, dispatch_batch_size=12, groups="micro-batch", group_size=3, **micro_batches
    )
    Producer(server.endpoint, "p").push(TOKENS, group_ids=IDS)
    with Trainer(server.endpoint, 2) as trainer:
        found = homes(trainer.train(), "p")
        assert {group: len(at) for group, at in found.items()} == dict.fromkeys("abcd", 1)
        server.await_status(steps_committed=1, balanced=True)


def test_a_group_too_long_for_its_micro_batch_is_refused_and_given_up(serve: Serve) -> None:
    server = serve(
        dp_size=2, dispatch_batch_size=4, groups="micro-batch", group_size=2, micro_batch_tokens=16
    )
    producer = Producer(server.endpoint, "p")
    answer = producer.push([9, 9, 8, 8], group_ids=["long", "long", "g", "g"])
    assert answer.outcomes == ["accepted", "refused", "accepted", "accepted"]
    assert (
        "group long has 18 tokens with sample p/1, a micro-batch takes at most 16"
        in (answer.errors["1"])
    )
    producer.push([7, 7], group_ids=["h", "h"])
    with Trainer(server.endpoint, 2) as trainer:
        trainer.train()
        server.await_status(steps_committed=1, balanced=True)
    assert server.scrape()["samples_dropped_total{reason=incomplete-group}"] == 1


def test_a_group_is_closed_at_no_more_than_its_micro_batch_takes(serve: Serve) -> None:
    server = serve(dp_size=2, dispatch_batch_size=12, groups="micro-batch", micro_batch_size=3)
    answer = server.post("/v1/groups/g/close?size=4")
    assert answer.status == 422
    assert "a micro-batch takes at most 3 samples, and the group has 4" in answer.text
    answer = server.post("/v1/groups/g/close?size=13")
    assert "a step takes at most 12 samples" in answer.text
    assert server.post("/v1/groups/g/close?size=3").status == 200
