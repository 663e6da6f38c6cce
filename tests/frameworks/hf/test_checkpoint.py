"""A checkpoint of Hugging Face's `Trainer` holds the stream too."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from examples import hf_trainer
from tests.examples.run import finish, torchrun
from tests.support.server import ServeProcess

RANKS, SAMPLES, BATCH = 2, 56, 16


def test_it_goes_on_from_a_checkpoint_of_the_trainer(tmp_path: Path) -> None:
    output = tmp_path / "trainer"
    options: dict[str, Any] = {
        "global_batch_size": BATCH,
        "micro_batch_tokens": 256,
        "journal_dir": tmp_path / "journal",
    }
    with ServeProcess(tmp_path, dp_size=RANKS, **options) as server, ThreadPoolExecutor() as pool:
        pushing = pool.submit(hf_trainer.roll_out, server.endpoint, SAMPLES)
        train(server, output, "--max-steps", "3")
        assert server.scrape()["samples_committed_total"] == 3 * BATCH
        last = output / "checkpoint-3"  # the Trainer saves where it ends
        train(server, output, "--checkpoint", last)
        pushing.result()
        assert server.wait() == 0  # everything is committed
    state = json.loads((output / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["global_step"] == 4


def train(server: ServeProcess, output: Path, *more: object) -> None:
    """Run the example, which pushes nothing itself, to its end."""
    arguments = ("--endpoint", server.endpoint, "--samples", "0", "--output", output, *more)
    with torchrun(output.parent, RANKS, "hf_trainer.py", *arguments) as process:
        finish(process)
