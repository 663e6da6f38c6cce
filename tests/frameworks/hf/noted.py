"""A trainer of this environment's examples, which writes down the gradients of every step.

noted.py TRAINER ENDPOINT FOLDER SAMPLES
"""

import sys
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from examples import hf_trainer, trl_async_grpo
from rollout_workers import MicroBatch, MicroBatchStream, StreamDataset
from rollout_workers.integrations.hugging_face import WholeSteps, steps_for_trainer
from rollout_workers.integrations.trl import steps_for_grpo
from tests.support.gradients import Diary


class Notes(TrainerCallback):
    """What the optimizer is about to use."""

    def __init__(self, dataset: StreamDataset, diary: Diary) -> None:
        self._dataset, self._diary = dataset, diary

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any
    ) -> None:
        assert self._dataset.step is not None
        self._diary.note(self._dataset.step, model)


def hugging_face(stream: MicroBatchStream, endpoint: str, folder: Path, samples: int) -> Any:
    if dist.get_rank() == 0:
        Thread(target=hf_trainer.roll_out, args=(endpoint, samples), daemon=True).start()
    dataset = steps_for_trainer(stream)
    return dataset, hf_trainer.make_trainer(dataset, folder, max_steps=1000)


class FixedCountTrainer(Trainer):
    """A Trainer that accumulates so many micro-batches, and overrides no more than this."""

    def get_train_dataloader(self) -> StreamDataset:
        return self.train_dataset


def fixed_count(stream: MicroBatchStream, endpoint: str, folder: Path, samples: int) -> Any:
    if dist.get_rank() == 0:
        Thread(target=hf_trainer.roll_out, args=(endpoint, samples), daemon=True).start()
    dataset = StreamDataset(stream, lambda step: map(MicroBatch.as_hf, step))
    arguments = TrainingArguments(
        str(folder), max_steps=1000, gradient_accumulation_steps=4, report_to=[], use_cpu=True
    )
    return dataset, FixedCountTrainer(hf_trainer.tiny_model(), arguments, train_dataset=dataset)


class StreamSFTTrainer(WholeSteps, SFTTrainer):
    """TRL's trainer for fine-tuning, whose batch is a step."""


def sft(stream: MicroBatchStream, endpoint: str, folder: Path, samples: int) -> Any:
    if dist.get_rank() == 0:
        Thread(target=hf_trainer.roll_out, args=(endpoint, samples), daemon=True).start()
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    arguments = SFTConfig(
        str(folder), max_steps=1000, bf16=False, save_strategy="no", report_to=[], use_cpu=True
    )
    trainer = StreamSFTTrainer(
        hf_trainer.tiny_model(),
        arguments,
        train_dataset=Dataset.from_dict({"input_ids": [[0]]}),  # it takes no other kind
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
        ),
    )
    trainer.train_dataset = dataset = steps_for_trainer(stream)
    return dataset, trainer


def trl(stream: MicroBatchStream, endpoint: str, folder: Path, samples: int) -> Any:
    generator = trl_async_grpo.StandIn(endpoint, trl_async_grpo.rollouts(samples))
    dataset = steps_for_grpo(stream)
    return dataset, trl_async_grpo.make_trainer(dataset, generator, folder, max_steps=1000)


MAKE = {
    "hf_trainer": hugging_face,
    "trl_async_grpo": trl,
    "hf_trainer by count": fixed_count,
    "trl_sft": sft,
}


def main(trainer_name: str, endpoint: str, folder: Path, samples: int) -> None:
    dist.init_process_group("gloo")
    diary = Diary()
    with MicroBatchStream(endpoint) as stream:
        dataset, trainer = MAKE[trainer_name](stream, endpoint, folder / "trainer", samples)
        trainer.args.max_grad_norm = 0.0  # it would clip
        trainer.add_callback(Notes(dataset, diary))
        trainer.train()
        dataset.commit()
    diary.save(folder, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
