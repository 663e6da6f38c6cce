"""Images and environment names, from real producers through a real dispatcher to the torch stream.

What vision-language RL pushes: patches and grids of another number of images in every sample, and
the name of the environment. Pushed over both planes; the dispatcher is killed in between.
"""

import json
import re
import signal
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_workers import MicroBatch, MicroBatchStream, RolloutProducer
from tests.support.addresses import free_address
from tests.support.server import ServeProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

DOCUMENT = Path(__file__).parents[2] / "docs" / "guide.md"
BATCH, PATCH, SAMPLES = 8, 24, 16
RAGGED = ("pixel_values", "image_grid_thw")
FIELDS = (
    f"input_ids:int64,pixel_values:float32[{PATCH}]:ragged,image_grid_thw:int64[3]:ragged,env:str"
)


def rollout(seed: int) -> dict[str, Any]:
    """A sample of 0 to 2 images, of any size each."""
    chance = np.random.default_rng(seed)
    grids = chance.integers(1, 4, (seed % 3, 3))
    return {
        "input_ids": chance.integers(0, 99, 5 + seed),
        "pixel_values": chance.random((grids.prod(axis=1).sum(), PATCH), np.float32),
        "image_grid_thw": grids,
        "env": ("math/gsm8k", "", "größe/日本")[seed % 3],
    }


def serve(folder: Path, address: str, **options: Any) -> ServeProcess:
    return ServeProcess(
        folder,
        listen=address,
        dp_size=1,
        global_batch_size=BATCH,
        window=4,
        micro_batch_tokens=64,
        journal_dir=folder / "journal",
        **options,
    )


def push(server: ServeProcess, address: str) -> None:
    """Half of the samples over each plane."""
    with RolloutProducer(address, ragged=RAGGED) as producer:
        for seed in range(0, SAMPLES, 2):
            producer.push(rollout(seed), sample_id=f"s{seed}", timeout=60)
    for seed in range(1, SAMPLES, 2):
        fields = {
            name: value if isinstance(value, str) else value.tolist()
            for name, value in rollout(seed).items()
        }
        body = json.dumps({"fields": fields, "sample_id": f"s{seed}"}).encode()
        assert server.post("/v1/samples", body).json["outcomes"] == ["accepted"]


def samples_in(found: MicroBatch) -> dict[str, dict[str, Any]]:
    """What a trainer reads out of a packed micro-batch, sample by sample."""
    cut = {"input_ids": found.cu_seqlens} | {name: found[name + "_cu_rows"] for name in RAGGED}
    return {
        sample: {name: found[name][cu[at] : cu[at + 1]] for name, cu in cut.items()}
        | {"env": found.text["env"][at]}
        for at, sample in enumerate(found.sample_ids)
    }


def as_they_come(address: str, steps: int) -> list[list[MicroBatch]]:
    """The micro-batches of so many steps, none of which is committed."""
    with MicroBatchStream(address, dp_rank=0, dp_size=1, prefetch_steps=steps) as stream:
        return [list(next(stream)) for _ in range(steps)]


def test_each_sample_is_trained_on_as_it_was_pushed_also_after_a_kill(tmp_path: Path) -> None:
    address = free_address()
    with ExitStack() as stack:
        server = stack.enter_context(serve(tmp_path, address, fields=FIELDS))
        push(server, address)
        before = as_they_come(address, SAMPLES // BATCH)
        server.send_signal(signal.SIGKILL)
        server.wait()
        server = stack.enter_context(serve(tmp_path, address, fields=FIELDS))
        after = as_they_come(address, SAMPLES // BATCH)
        assert server.status()["balanced"]

    assert [len(step) for step in before] == [len(step) for step in after]
    found: dict[str, dict[str, Any]] = {}
    for one, again in zip(chain(*before), chain(*after), strict=True):
        assert (one.sample_ids, one.text) == (again.sample_ids, again.text)
        assert one.tensors.keys() == again.tensors.keys()
        assert all(torch.equal(one[name], again[name]) for name in one.tensors)
        found |= samples_in(one)
    assert len(found) == SAMPLES
    for seed in range(SAMPLES):
        expected, sample = rollout(seed), found[f"s{seed}"]
        assert sample.pop("env") == expected.pop("env")
        for name, value in expected.items():
            assert sample[name].tolist() == value.tolist(), (seed, name)


def test_what_the_document_pushes_is_in_the_micro_batch(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    (text,) = (block for block in blocks if "image_grid_thw" in block)
    address = free_address()
    with serve(tmp_path, address), RolloutProducer(address, ragged=RAGGED) as producer:
        for count in range(BATCH):
            pixels = np.ones((4 * count, 1176), np.float32)
            given = {"ids": [1, 2], "patches": pixels, "grids": np.full((count, 3), 2)}
            exec(text, given | {"producer": producer})
        ((one, *_),) = as_they_come(address, 1)
        assert set(one.text["env"]) == {"math/gsm8k"}
        patches, images = one.pixel_values_cu_rows.diff(), one.image_grid_thw_cu_rows.diff()
        assert patches.tolist() == (4 * images).tolist()
