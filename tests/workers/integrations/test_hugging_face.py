"""Arguments of a Hugging Face `Trainer` with which its loss would not be a step's are refused."""

from types import SimpleNamespace

import pytest

from rollout_dispatcher.errors import ConfigError
from rollout_workers.integrations.hugging_face import WholeSteps


def trainer(accumulation: int = 1, *, averages: bool = True, processes: int = 2) -> WholeSteps:
    found = WholeSteps()
    found.train_dataset = [["a micro-batch"]]
    found.args = SimpleNamespace(
        gradient_accumulation_steps=accumulation,
        average_tokens_across_devices=averages,
        world_size=processes,
    )
    return found


def test_steps_are_not_added_up_nor_divided_by_the_tokens_of_one_rank() -> None:
    with pytest.raises(ConfigError, match=r"4 steps of the dispatcher .* 4 times the loss; set it"):
        trainer(4).get_train_dataloader()
    with pytest.raises(ConfigError, match=r"average_tokens_across_devices is False, .* set it"):
        trainer(averages=False).get_train_dataloader()


def test_what_is_the_default_and_a_single_process_train() -> None:
    for fine in (trainer(), trainer(averages=False, processes=1)):
        assert fine.get_train_dataloader() is fine.train_dataset
