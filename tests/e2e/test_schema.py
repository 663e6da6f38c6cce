"""A stray sample after the first push is refused at once; one before it gives way to --fields.

The stray is the README's own curl example; the producers push what GRPO trainers do.
"""

import re
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_dispatcher.errors import SampleRefused
from rollout_workers import RolloutProducer
from tests.e2e.harness import assert_each_exactly_once, finish, read_diaries, torchrun
from tests.support.server import Response, ServeProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
README = Path(__file__).parents[2] / "README.md"
BATCH = 8


def serve(folder: Path, **options: Any) -> ServeProcess:
    return ServeProcess(
        folder, dp_size=2, global_batch_size=BATCH, micro_batch_tokens=2048, **options
    )


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def curl_example(server: ServeProcess) -> Response:
    """Push the body of the README's curl command."""
    found = re.search(r"^curl .*?/v1/samples.*?(?:\\\n.*?)*$", README.read_text(), re.MULTILINE)
    assert found is not None
    words = shlex.split(found[0].replace("\\\n", " "))
    return server.post("/v1/samples", words[words.index("-d") + 1].encode())


def rollout(tokens: int, **fields: Any) -> dict[str, Any]:
    mask = np.ones(tokens, np.bool_)
    return {"input_ids": np.arange(tokens), "loss_mask": mask} | fields


def with_logprobs(tokens: int) -> dict[str, Any]:
    return rollout(tokens, logprobs=np.full(tokens, -0.5, np.float32), reward=np.float32(1))


def push(producer: RolloutProducer, first: int, count: int) -> set[str]:
    names = {f"real-{number}" for number in range(first, first + count)}
    for number, name in enumerate(sorted(names)):
        producer.push(with_logprobs(3 + number % 9), sample_id=name, timeout=60)
    return names


FIELDS = "input_ids:int64,loss_mask:bool,logprobs:float32,reward:float32:per-sample"


def test_a_stray_first_push_gives_way_to_declared_fields_and_training_goes_on(
    tmp_path: Path, stack: ExitStack
) -> None:
    journal = tmp_path / "journal"
    with serve(tmp_path, journal_dir=journal) as server:
        assert curl_example(server).status == 200
        with RolloutProducer(server.endpoint) as producer:
            with pytest.raises(
                SampleRefused, match=r"from an HTTP client\): logprobs is unexpec"
            ) as e:
                producer.push(with_logprobs(5))
            assert "restart with the right --fields" in str(e.value)
    server = stack.enter_context(serve(tmp_path, journal_dir=journal, fields=FIELDS))
    trainers = stack.enter_context(torchrun(2, server.endpoint, tmp_path))
    with RolloutProducer(server.endpoint) as producer:
        expected = push(producer, 100, 2 * BATCH)
        late = curl_example(server)
        assert late.status == 422
        assert "logprobs is missing" in late.json["errors"]["0"]
        seen = server.scrape()
        assert seen["samples_dropped_total{reason=schema}"] == 1
        assert seen["samples_received_total{outcome=accepted}"] == 2 * BATCH + 1
        producer.end_stream()
    finish(trainers)
    assert server.wait() == 0
    assert_each_exactly_once(read_diaries(tmp_path), expected)
