"""Trainers of Hugging Face and TRL with their own losses, on two ranks, beside one process."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from examples import hf_trainer, trl_async_grpo
from rollout_dispatcher.record.recording import load_recording
from rollout_dispatcher.simulate.recorded import main_pass
from tests.examples.gradients import record
from tests.examples.run import finish, torchrun
from tests.support.gradients import diaries, largest_difference
from tests.support.server import ServeProcess

RANKS, SAMPLES = 2, 56
SERVE: dict[str, Any] = {"global_batch_size": 16, "micro_batch_tokens": 256, "strategy": "window"}
#: Of float32; the reference computes in float64.
TOLERANCE = 1e-5

Fields = dict[str, Tensor]


def cross_entropy(losses: Tensor, sample: Fields) -> Tensor:
    """What a causal model's own loss adds up."""
    return losses


def clipped_policy_gradient(losses: Tensor, sample: Fields) -> Tensor:
    """GRPO's, as TRL has it by default."""
    ratio = torch.exp(-losses - sample["logprobs"][1:])
    clipped = ratio.clamp(0.8, 1.2)
    return -torch.min(ratio * sample["advantage"], clipped * sample["advantage"])


@dataclass(frozen=True, slots=True)
class Case:
    """An example, and the loss of its tokens."""

    framework: str
    example: Any
    loss: Callable[[Tensor, Fields], Tensor]
    serve: dict[str, Any]

    def loss_of(self, model: nn.Module, samples: list[str]) -> Tensor:
        """Mean over all counted tokens, one sample after the other."""
        fields: dict[str, Fields] = {
            each.sample_id: {name: torch.as_tensor(array) for name, array in each.fields.items()}
            for each in self.example.rollouts(SAMPLES)
        }
        counted = []
        for name in samples:
            ids = fields[name]["input_ids"]
            logits = model(input_ids=ids[None]).logits[0].double()
            losses = functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
            counted.append(self.loss(losses, fields[name])[fields[name]["loss_mask"][1:]])
        return torch.cat(counted).mean()


CASES = {
    "hf_trainer": Case("Hugging Face Trainer", hf_trainer, cross_entropy, {}),
    "trl_async_grpo": Case(
        "TRL AsyncGRPOTrainer",
        trl_async_grpo,
        clipped_policy_gradient,
        {"group_size": trl_async_grpo.GENERATIONS, "max_staleness": 4},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    case = CASES[name]
    ranks = train(name, tmp_path, SERVE | case.serve)
    assert len({step["micro_batches"] for step in ranks[0]}) > 1, "all steps were alike"
    difference = largest_difference(ranks, case.example.tiny_model().double(), case.loss_of)
    assert difference < TOLERANCE
    record(record_property, case.framework, f"{name}.py", difference)


def test_a_trainer_that_accumulates_by_count_needs_its_data_loader_replaced_only(
    tmp_path: Path,
) -> None:
    by_count = {"global_batch_size": 8, "micro_batch_size": 1, "final_batch": "drop"}
    ranks = train("hf_trainer by count", tmp_path, by_count)
    assert [len(rank) for rank in ranks] == [SAMPLES // 8] * RANKS
    case = CASES["hf_trainer"]
    difference = largest_difference(ranks, case.example.tiny_model().double(), case.loss_of)
    assert difference < TOLERANCE


def test_trl_s_sft_trainer_trains_on_steps_too(tmp_path: Path) -> None:
    ranks = train("trl_sft", tmp_path, SERVE)
    assert len({step["micro_batches"] for step in ranks[0]}) > 1, "all steps were alike"
    case = CASES["hf_trainer"]
    difference = largest_difference(ranks, case.example.tiny_model().double(), case.loss_of)
    assert difference < TOLERANCE


@pytest.mark.parametrize("name", ["hf_trainer", "trl_async_grpo"])
def test_what_micro_batches_took_is_measured(name: str, tmp_path: Path) -> None:
    """But for a step at the beginning: DDP arranges its buckets in collectives of its own."""
    folder = tmp_path / "record"
    train(name, tmp_path, SERVE | CASES[name].serve | {"record_dir": folder})
    steps = load_recording(folder).trained()
    took = {step.number: main_pass(step) for step in steps}
    assert len(took) > 2
    assert {number for number, compute in took.items() if compute is None} <= {0, 1}
    for step in steps:
        if (compute := took[step.number]) is not None:
            assert compute.shape == step.cost.shape
            assert (compute > 0).all(), "each of them, not the step as a whole"


def train(name: str, folder: Path, serve: dict[str, Any]) -> list[list[Any]]:
    """By rank, what it noted of every step; each sample was in one of them."""
    program = Path(__file__).with_name("noted.py")
    with ServeProcess(folder, dp_size=RANKS, **serve) as server:
        words = (name, server.endpoint, folder, SAMPLES)
        with torchrun(folder, RANKS, str(program), *words) as process:
            finish(process)
    ranks = diaries(folder)
    seen = [sample for rank in ranks for step in rank for sample in step["samples"]]
    assert sorted(seen) == sorted(f"s{index}" for index in range(SAMPLES))
    return ranks
