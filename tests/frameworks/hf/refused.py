"""Trainers of this environment with arguments that are refused: writes down what each is told.

refused.py FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainingArguments

from examples import hf_trainer, trl_async_grpo
from rollout_dispatcher.errors import ConfigError

#: What a rank would train on if it was let.
NOTHING: list[Any] = []


def hugging_face(folder: Path, **options: Any) -> Any:
    arguments = TrainingArguments(str(folder), max_steps=1, report_to=[], use_cpu=True, **options)
    return hf_trainer.StreamTrainer(hf_trainer.tiny_model(), arguments, train_dataset=NOTHING)


def grpo(folder: Path, **options: Any) -> Any:
    generator = trl_async_grpo.StandIn("nowhere", [])
    trainer = trl_async_grpo.make_trainer(NOTHING, generator, folder, max_steps=1)  # type: ignore[arg-type]
    for name, value in options.items():
        setattr(trainer.args, name, value)
    return trainer


def told(trainer: Any) -> str:
    try:
        trainer.train()
    except ConfigError as error:
        return str(error)
    return "nothing"


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    found = {
        "accumulates": told(hugging_face(folder, gradient_accumulation_steps=4)),
        "averages its own": told(hugging_face(folder, average_tokens_across_devices=False)),
        "GRPO accumulates": told(grpo(folder, gradient_accumulation_steps=4)),
    }
    (folder / f"told-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
