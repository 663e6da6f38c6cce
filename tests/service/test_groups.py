"""Groups that stay together, seen from outside: real processes, real sockets."""

import json
from collections import defaultdict
from pathlib import Path
from signal import SIGKILL

import pytest

from rollout_dispatcher.errors import SampleRefused
from rollout_workers import RolloutProducer
from tests.e2e.groups.rollouts import fields
from tests.e2e.groups.unfinished import unfinished
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
        dp_size=2, global_batch_size=12, groups="micro-batch", group_size=3, **micro_batches
    )
    Producer(server.endpoint, "p").push(TOKENS, group_ids=IDS)
    with Trainer(server.endpoint, 2) as trainer:
        found = homes(trainer.train(), "p")
        assert {group: len(at) for group, at in found.items()} == dict.fromkeys("abcd", 1)
        server.await_status(steps_committed=1, balanced=True)


def test_a_group_too_long_for_its_micro_batch_is_refused_and_given_up(serve: Serve) -> None:
    server = serve(
        dp_size=2, global_batch_size=4, groups="micro-batch", group_size=2, micro_batch_tokens=16
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
    server = serve(dp_size=2, global_batch_size=12, groups="micro-batch", micro_batch_size=3)
    answer = server.post("/v1/groups/g/close?size=4")
    assert answer.status == 422
    assert "a micro-batch takes at most 3 samples, and the group has 4" in answer.text
    answer = server.post("/v1/groups/g/close?size=13")
    assert "a step takes at most 12 samples" in answer.text
    assert server.post("/v1/groups/g/close?size=3").status == 200


def test_a_prompt_that_a_killed_worker_had_begun_is_trained_on_as_its_successor_pushes_it(
    serve: Serve,
) -> None:
    server = serve(global_batch_size=8, micro_batch_tokens=4096)
    with unfinished(server.endpoint, "w", 1, 3) as worker:
        worker.begun(3)
        worker.kill()
    server.await_status(producers_connected=0)
    answers = [fields(f"w.0/{at}") for at in range(9)]
    with RolloutProducer(server.endpoint) as producer:
        producer.push_group(answers[:8], group_id="w.0")
        with pytest.raises(SampleRefused, match="is complete: all of its members") as refused:
            producer.push(answers[8], group_id="w.0", group_size=8)
    assert refused.value.reason == "group-closed"
    with Trainer(server.endpoint, 2) as trainer:
        trained = {name for part in trainer.train() for name in part.sample_ids}
    assert len(trained) == 8
    assert not any(name.startswith("w.0/") for name in trained)
    assert server.scrape()["samples_dropped_total{reason=superseded}"] == 3
    server.await_status(steps_committed=1, balanced=True)
    assert "3 accepted samples are dropped (superseded)" in server.log()


def test_a_late_member_is_refused_over_http_and_after_a_crash(serve: Serve, tmp_path: Path) -> None:
    server = serve(journal_dir=tmp_path / "journal", group_size=2)
    member = {"group_id": "g", "fields": {"input_ids": [1, 2]}}
    assert server.post("/v1/samples", json.dumps([member] * 2).encode()).status == 200
    server.send_signal(SIGKILL)
    server.wait()
    server = serve(journal_dir=tmp_path / "journal", group_size=2)
    answer = server.post("/v1/samples", json.dumps(member).encode())
    assert (answer.status, answer.json["outcomes"]) == (422, ["refused"])
    assert (
        "group g is complete: all of its members have come; a group_id"
        in answer.json["errors"]["0"]
    )
    server.await_status(open_groups=0, balanced=True)
