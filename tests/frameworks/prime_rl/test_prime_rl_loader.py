"""`examples/prime_rl_loader.py`: prime-rl's own loss over the stream's steps."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.examples.gradients import measure, record
from tests.examples.run import samples
from tests.frameworks.prime_rl import source

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.skipif(not source.make_importable(), reason=source.__doc__ or "")
def test_gradients_are_those_of_one_process_on_one_big_batch(
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = np.random.default_rng(0)
    rollouts = [
        {
            **fields,
            "advantages": np.full(len(fields["input_ids"]), random.normal(), np.float32),
            "inference_logprobs": -random.random(len(fields["input_ids"]), np.float32) - 3.5,
        }
        for fields in samples(24)
    ]
    loop = Path(__file__).with_name("loop.py")
    where = {"DISPATCHER_ENDPOINT": "ENDPOINT"}
    difference = measure(tmp_path, str(loop), pushed=rollouts, environment=where)
    record(record_property, "prime-rl", "prime_rl_loader.py", difference)
    assert difference < 1e-9
