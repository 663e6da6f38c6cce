"""`examples/ddp_grpo.py`: the reward rises, and every group that was pushed is trained on once."""

import re
from pathlib import Path
from statistics import mean

import pytest

from tests.examples.run import example, finish, torchrun
from tests.support.server import ServeProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
GROUPS = 176


def trained(folder: Path, *options: object) -> str:
    """What ranks print that train on what a worker writes, until all of it is over."""
    with ServeProcess(
        folder, dp_size=2, global_batch_groups=8, group_size=8, micro_batch_tokens=512, sync="step"
    ) as server:
        where = ("--endpoint", server.endpoint, "--weights", folder / "weights.pt")
        with (
            torchrun(folder, 2, "ddp_grpo.py", "train", *where, *options) as trainers,
            example("ddp_grpo.py", "rollout", *where, "--groups", GROUPS) as rollouts,
        ):
            printed = finish(trainers)
            finish(rollouts)
        assert server.wait() == 0
    return printed


def test_the_reward_rises_and_each_sample_is_trained_on_once(tmp_path: Path) -> None:
    printed = trained(tmp_path)
    assert f"trained on {8 * GROUPS} samples" in printed
    rewards = [float(found) for found in re.findall(r"mean reward ([\d.]+)", printed)]
    assert len(rewards) == GROUPS // 8
    assert mean(rewards[:3]) < 0.25
    assert mean(rewards[-3:]) > 0.75


def test_a_number_of_steps_ends_rollouts_and_the_dispatcher(tmp_path: Path) -> None:
    assert f"trained on {2 * 64} samples" in trained(tmp_path, "--steps", 2)
