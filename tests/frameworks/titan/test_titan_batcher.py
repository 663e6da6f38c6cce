"""`examples/titan_batcher.py`: torchtitan's trainer on the stream."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.examples.gradients import measure, record
from tests.examples.run import samples

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
SHIM = Path(__file__).with_name("cpu.py")


def test_gradients_are_those_of_one_process_on_one_big_batch(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    difference = measure(
        tmp_path, "titan_batcher.py", "--endpoint", "ENDPOINT", "--steps", "4",
        pushed=samples(24), shim=SHIM, dtype="float32",
    )  # fmt: skip
    record(record_property, "torchtitan", "titan_batcher.py", difference)
    assert difference < 1e-5
