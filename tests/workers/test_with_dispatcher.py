"""Both clients against a real dispatcher: what its answers mean to a user."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_dispatcher.errors import (
    BufferFull,
    GenerationFenced,
    PushTimeout,
    RankRefused,
    SampleRefused,
)
from rollout_workers import (
    MicroBatchStream,
    Outcome,
    RolloutProducer,
    RolloutSample,
)
from tests.support.server import ServeProcess, eventually, serve

pytestmark = pytest.mark.e2e

FIELDS = {"input_ids": [1, 2, 3]}


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """Over TCP: two DP ranks, steps of four samples, a buffer of six."""
    options = {"dp_size": 2, "global_batch_size": 4, "micro_batch_tokens": 16}
    with serve(tmp_path / "server", **options) as address:
        yield address


def test_a_second_stream_in_the_process_fences_the_first(tmp_path: Path) -> None:
    """Never do both train: each would take half of the samples."""
    options = {"dp_size": 1, "global_batch_size": 1, "micro_batch_size": 1}
    with serve(tmp_path / "server", **options) as address:
        with RolloutProducer(address) as producer:
            producer.push(FIELDS)
        first = MicroBatchStream(address)
        taken = next(first)
        with MicroBatchStream(address) as second:
            again = next(second)
            assert again.digest == taken.digest
            with pytest.raises(GenerationFenced, match="newer process group"):
                next(first)
            with pytest.raises(GenerationFenced, match="newer process group"):
                list(taken)
            list(again)
            again.commit()
        first.close()


def test_a_push_that_timed_out_and_is_pushed_again_by_its_ids_is_trained_once(
    tmp_path: Path,
) -> None:
    options = {"dp_size": 1, "global_batch_size": 2, "micro_batch_size": 1, "window": 1}
    with serve(tmp_path / "server", **options) as address, RolloutProducer(address) as producer:
        # Without a rank the buffer fills; its producer may have some pushes blocked.
        failures = []
        for _ in range(4):
            try:
                producer.push(FIELDS, timeout=0.3)
            except BufferFull as full:
                failures.append(full)
        assert len(failures) >= 2
        blocked = [full for full in failures if full.sample_ids]
        assert blocked, "the dispatcher has it"
        with MicroBatchStream(address) as stream:
            for step in islice(stream, 1):
                list(step)
                step.commit()
            outcomes = [
                producer.push(FIELDS, sample_id=full.sample_ids[0], timeout=10) for full in blocked
            ]
        assert set(outcomes) == {Outcome.DUPLICATE}


def test_a_push_that_timed_out_more_often_than_it_has_credits_is_trained_once(
    tmp_path: Path,
) -> None:
    options = {"dp_size": 1, "global_batch_size": 2, "micro_batch_size": 1, "window": 1}
    with (
        serve(tmp_path / "server", producer_credits=2, **options) as address,
        RolloutProducer(address) as producer,
    ):
        producer.push_many([FIELDS, FIELDS])
        sample_id = None
        for _ in range(5):  # the later ones are withdrawn, while the first are blocked
            with pytest.raises((BufferFull, PushTimeout)) as full:
                producer.push(FIELDS, sample_id=sample_id, timeout=0.2)
            error = full.value
            assert isinstance(error, BufferFull | PushTimeout)
            assert sample_id in (None, *error.sample_ids)
            (sample_id,) = error.sample_ids
        trained = list[str]()
        with MicroBatchStream(address) as stream:
            for step in stream:
                trained += [name for batch in step for name in batch.sample_ids]
                step.commit()
                if step.number == 0:
                    producer.push(FIELDS, sample_id=sample_id, timeout=30)
                    producer.end_stream()
        assert len(trained) == len(set(trained)) == 3


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            {},
            {"loss_normalisation": "sequence-mean"},
            "loss_normalisation is token-mean on DP rank 0, sequence-mean on DP rank 1",
        ),
        ({"grad_reduction": "sum"}, {}, "grad_reduction is sum on DP rank 0, mean on DP rank 1"),
        (
            {"losses": {"kl": "sequence-mean"}},
            {"losses": {"kl": "token-mean"}},
            r"losses\['kl'\] is sequence-mean on DP rank 0, token-mean on",
        ),
        ({"trainer_divides_by": 2}, {}, "trainer_divides_by is 2 on DP rank 0, 1 on DP rank 1"),
        ({}, {"packed_length": 16}, "packed_length is not given on DP rank 0, 16 on DP rank 1"),
        ({}, {"layout": "jagged"}, "layout is packed on DP rank 0, jagged on DP rank 1"),
        ({}, {"weights_dtype": torch.bfloat16}, "weights_dtype is torch.float32 on DP rank 0"),
    ],
)
def test_ranks_that_do_not_train_alike_get_the_difference_and_none_of_them_trains(
    endpoint: str, first: dict[str, Any], second: dict[str, Any], words: str
) -> None:
    with MicroBatchStream(endpoint, dp_rank=0, dp_size=2, **first) as one:
        with pytest.raises(RankRefused, match=words):
            MicroBatchStream(endpoint, dp_rank=1, dp_size=2, generation=one.generation, **second)
        with pytest.raises(RankRefused, match=words):
            next(one)
    explicit: dict[str, Any] = {"layout": "packed", "loss_normalisation": "token-mean"}
    with MicroBatchStream(endpoint, dp_rank=0, dp_size=2) as one:
        found = MicroBatchStream(
            endpoint, dp_rank=1, dp_size=2, generation=one.generation, **explicit
        )
        found.close()


@pytest.mark.parametrize("layout", ["packed", "padded", "jagged"])
def test_a_mask_of_all_ones_marks_all_but_the_first_token_whichever_way_it_comes(
    layout: str, tmp_path: Path
) -> None:
    sample: dict[str, Any] = {"input_ids": [5, 6, 7], "loss_mask": [True] * 3}
    with ServeProcess(tmp_path, dp_size=1, global_batch_size=4, micro_batch_size=4) as server:
        for shifted in (False, True):
            with RolloutProducer(server.endpoint, loss_mask_shifted=shifted) as producer:
                producer.push(sample)
            body = {"fields": sample, "loss_mask_shifted": shifted}
            assert server.post("/v1/samples", json.dumps(body).encode()).status == 200
        assert server.scrape()["loss_positions_left_out_total"] == 4
        with MicroBatchStream(server.endpoint, layout=layout) as stream:
            step = next(stream)
            (batch,) = (one.as_packed() for one in step)
            step.commit()
    assert step.loss_tokens == 8
    assert batch.loss_weights.tolist() == [0, 1, 1] * 4
    assert batch.labels.tolist() == [-100, 6, 7] * 4


def test_a_group_of_another_size_than_group_size_is_refused_and_may_come_whole(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"dp_size": 1, "global_batch_size": 4, "micro_batch_size": 1}
    with (
        ServeProcess(tmp_path, group_size=4, **options) as server,
        RolloutProducer(server.endpoint) as producer,
    ):
        for count in (2, 3, 5):
            words = rf"group g is of {count} samples, and --group-size is 4: push the group whole"
            with pytest.raises(SampleRefused, match=words) as refused:
                producer.push_group([FIELDS] * count, "g")
            assert refused.value.reason == "group-size"
        producer.push_group([FIELDS] * 4, "g")
        server.await_status(accepted=4, ready=4, balanced=True)


def test_samples_of_weights_to_come_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"dp_size": 1, "global_batch_size": 4, "micro_batch_size": 1}
    with (
        ServeProcess(tmp_path, max_staleness=1, **options) as server,
        RolloutProducer(server.endpoint) as producer,
        MicroBatchStream(server.endpoint) as stream,
    ):
        stream.set_policy_version(3)
        eventually(lambda: producer.feedback().policy_version == 3, "it is reported")
        assert producer.push(FIELDS, policy_version=4) is Outcome.ACCEPTED
        assert not caplog.messages
        assert producer.push(FIELDS, policy_version=40) is Outcome.ACCEPTED
        (line,) = caplog.messages
        assert "samples have policy_version 40, and the trainer stands at 3: they count" in line
        assert ": samples have policy_version 40" in server.log()


def test_with_max_staleness_missing_policy_versions_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {
        "dp_size": 1, "global_batch_size": 1, "micro_batch_size": 1, "buffer_capacity": 8,
    }  # fmt: skip
    with (
        ServeProcess(tmp_path, max_staleness=1, **options) as server,
        RolloutProducer(server.endpoint) as producer,
        MicroBatchStream(server.endpoint) as stream,
    ):
        with pytest.raises(SampleRefused, match="has no policy_version, and --max") as refused:
            producer.push(FIELDS)
        assert refused.value.reason == "policy-version-missing"
        producer.push(FIELDS, staleness_exempt=True)
        producer.push_many([RolloutSample(FIELDS, policy_version=3)])
        producer.push_group([RolloutSample(FIELDS, staleness_exempt=True)], "g")
        trained = []
        for step in islice(stream, 3):
            trained += [version for batch in step for version in batch.policy_versions]
            step.commit()
        server.await_status(steps_committed=3, steps_unjudged=3)
        warning = (
            "--max-staleness is not enforced: the trainer has committed 3 steps and reported no "
            "policy version; call stream.set_policy_version(version) on DP rank 0"
        )
        assert f"warning: {warning}\n" in server.get("/readyz").text
        assert server.status()["warnings"] == [warning]
        assert server.scrape()["steps_unjudged"] == 3
        assert server.scrape()["samples_refused_total{reason=policy-version-missing}"] == 1
    assert trained == [None, 3, None]
    (line,) = [text for text in caplog.messages if "--max-staleness" in text]
    assert "committed steps and reported no policy version" in line
