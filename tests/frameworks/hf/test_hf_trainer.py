"""Hugging Face `Trainer` with its own loss and normalisation, fed by a dispatcher."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples import hf_trainer
from tests.frameworks.report import Integration
from tests.support.examples import EXAMPLES, torchrun
from tests.support.gradients import diaries, largest_difference
from tests.support.integration import integration_lines
from tests.support.server import ServeProcess

RANKS, SAMPLES, BATCH = 2, 56, 16
#: The model's loss computes in float32 whatever the model's type.
TOLERANCE = 1e-6
SAMPLE = {each.sample_id: each.fields for each in hf_trainer.rollouts(SAMPLES)}


def whole_batch_loss(model: nn.Module, samples: list[str]) -> Tensor:
    """Mean over all counted tokens, one sample after the other."""
    counted = []
    for name in samples:
        ids, mask = (torch.as_tensor(SAMPLE[name][key]) for key in ("input_ids", "loss_mask"))
        logits = model(input_ids=ids[None]).logits[0]
        counted.append(functional.cross_entropy(logits[:-1], ids[1:], reduction="none")[mask[1:]])
    return torch.cat(counted).mean()


def test_gradients_are_those_of_one_process(
    tmp_path: Path, integrated: Callable[[Integration], None]
) -> None:
    program = Path(__file__).with_name("hf_trainer_noted.py")
    options = {"dispatch_batch_size": BATCH, "micro_batch_tokens": 256, "strategy": "window"}
    with ServeProcess(tmp_path, dp_size=RANKS, **options) as server:
        torchrun(RANKS, program, tmp_path, server.endpoint, str(tmp_path), str(SAMPLES))
    ranks = diaries(tmp_path)
    seen = [name for rank in ranks for step in rank for name in step["samples"]]
    assert sorted(seen) == sorted(SAMPLE)
    assert len({step["micro_batches"] for step in ranks[0]}) > 1, "all steps were alike"
    model = hf_trainer.tiny_model().double()
    difference = largest_difference(ranks, model, whole_batch_loss)
    assert difference < TOLERANCE
    example = EXAMPLES / "hf_trainer.py"
    integrated(
        Integration(
            framework="Hugging Face Trainer",
            example=f"examples/{example.name}",
            lines=integration_lines(example),
            ranks=RANKS,
            gradient_difference=difference,
        )
    )


def test_it_goes_on_from_a_checkpoint_of_the_trainer(tmp_path: Path) -> None:
    example, output = EXAMPLES / "hf_trainer.py", tmp_path / "trainer"
    options = {
        "dispatch_batch_size": BATCH,
        "micro_batch_tokens": 256,
        "journal_dir": tmp_path / "journal",
        "retain": "checkpoint",
    }
    with ServeProcess(tmp_path, dp_size=RANKS, **options) as server, ThreadPoolExecutor() as pool:
        pushing = pool.submit(hf_trainer.roll_out, server.endpoint, SAMPLES)
        arguments = ("--endpoint", server.endpoint, "--samples", "0", "--output", str(output))
        torchrun(RANKS, example, tmp_path, *arguments, "--max-steps", "3")
        assert server.scrape()["samples_committed_total"] == 3 * BATCH
        last = output / "checkpoint-3"  # the Trainer saves where it ends
        torchrun(RANKS, example, tmp_path, *arguments, "--checkpoint", str(last))
        pushing.result()
        assert server.wait() == 0  # everything is committed
    state = json.loads((output / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["global_step"] == 4
