"""examples/hf_trainer.py, which writes down the gradients of every step.

hf_trainer_noted.py ENDPOINT FOLDER SAMPLES
"""

import sys
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from examples.hf_trainer import StreamTrainer, make_trainer, roll_out
from rollout_workers import MicroBatchStream
from tests.support.gradients import Diary


class Notes(TrainerCallback):
    """What the optimizer is about to use."""

    def __init__(self, trainer: StreamTrainer, diary: Diary) -> None:
        self._trainer, self._diary = trainer, diary

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self._trainer.step is not None
        self._diary.note(self._trainer.step, self._trainer.model)


def main(endpoint: str, folder: Path, samples: int) -> None:
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        Thread(target=roll_out, args=(endpoint, samples), daemon=True).start()
    diary = Diary()
    with MicroBatchStream(endpoint) as stream:
        trainer = make_trainer(stream, folder / "trainer", max_steps=1000)
        trainer.args.max_grad_norm = 0.0  # as it clips
        trainer.add_callback(Notes(trainer, diary))
        trainer.train()
    diary.save(folder, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
