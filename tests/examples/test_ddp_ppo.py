"""`examples/ddp_ppo.py`: the reward rises, the critic learns it, and versions are of four steps."""

import re
from pathlib import Path
from statistics import mean

import pytest

from tests.examples.run import example, finish, torchrun
from tests.support.server import ServeProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
PROMPTS, ANSWERS, BATCH = 160, 16, 32


def test_mini_batches_of_a_version_train_actor_and_critic(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    with ServeProcess(
        tmp_path, dp_size=2, global_batch_size=BATCH, micro_batch_tokens=512,
        sync="step", steps_per_version=4, max_staleness=4,
    ) as server:  # fmt: skip
        where = ("--endpoint", server.endpoint, "--weights", weights)
        with (
            torchrun(tmp_path, 2, "ddp_ppo.py", "train", *where) as trainers,
            example("ddp_ppo.py", "rollout", *where, "--prompts", PROMPTS) as rollouts,
        ):
            finish(rollouts)
            printed = finish(trainers)
        assert server.wait() == 0
    steps = PROMPTS * ANSWERS // BATCH
    rewards = [float(found) for found in re.findall(r"mean reward ([\d.]+)", printed)]
    errors = [float(found) for found in re.findall(r"error ([\d.]+)", printed)]
    assert len(rewards) == len(errors) == steps
    assert mean(rewards[:4]) < 0.3
    assert mean(rewards[-4:]) > 0.6
    assert mean(errors[-4:]) < 0.3  # one that says 0 is off by 1
