"""`examples/verl_fsdp.py`: verl's FSDP engine on the stream."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from tests.examples.gradients import measure, record
from tests.examples.run import samples

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
SHIM = Path(__file__).with_name("cpu.py")


def test_gradients_are_those_of_one_process_on_one_big_batch(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    model = tiny_model(tmp_path / "model")
    difference = measure(
        tmp_path, "verl_fsdp.py", "--endpoint", "ENDPOINT", "--model", str(model),
        "--attention", "sdpa", "--dtype", "fp32", pushed=samples(24), shim=SHIM, dtype="float32",
    )  # fmt: skip
    record(record_property, "verl, FSDP engine", "verl_fsdp.py", difference)
    assert difference < 1e-5


def tiny_model(folder: Path) -> Path:
    """A Qwen 2 with nothing in it."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
