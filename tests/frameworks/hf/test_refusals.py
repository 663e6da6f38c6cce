"""Arguments with which the loss would not be a step's are refused by the trainers as they are."""

import json
from pathlib import Path

from tests.examples.run import finish, torchrun


def test_they_are_told_what_to_set_before_anything_is_trained(tmp_path: Path) -> None:
    with torchrun(tmp_path, 2, str(Path(__file__).with_name("refused.py")), tmp_path) as process:
        finish(process)
    for rank in range(2):
        told = json.loads((tmp_path / f"told-{rank}.json").read_text())
        for accumulates in (told["accumulates"], told["GRPO accumulates"]):
            assert "gradient_accumulation_steps is 4" in accumulates
            assert "set it to 1" in accumulates
            assert "--global-batch-size" in accumulates
        assert "average_tokens_across_devices is False" in told["averages its own"]
        assert "set it to True" in told["averages its own"]
