"""A slow rank of four gets less work, another one when that is slow; gradients stay what they were.

Held beside clocks of the trainers' own, round what they compute.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.gradients import diaries, largest_difference
from tests.support.uneven import STEPS, lost, run, samples, share
from tests.workers.support.tiny_model import TinyModel

pytestmark = [pytest.mark.e2e, pytest.mark.alone]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["ddp", "fsdp2"])
def test_work_goes_where_it_is_done_first_and_gradients_are_the_same(
    model: str, tmp_path: Path
) -> None:
    steps = run(tmp_path, model, "auto")
    assert len(steps) == STEPS
    log = (tmp_path / "serve.log").read_text()
    assert "rank 1 takes 1." in log, log
    assert "2 takes 1." in log, log
    for rank, since in ((1, 20), (2, STEPS - 10)):  # 0.18 on an idle machine
        settled = steps[since : since + 10]
        assert 0.16 < share(settled, rank) < 0.21
        assert lost(settled, model) < lost(steps[:5], model) / 2
    if model == "ddp":
        assert largest_difference(diaries(tmp_path), TinyModel(), _mean_loss) < 1e-9


@pytest.mark.timeout(300)
def test_a_cost_is_fitted_where_nobody_can_tell_waits_apart(tmp_path: Path) -> None:
    steps = run(tmp_path, "unseen", "auto", slow=1.0)
    log = (tmp_path / "serve.log").read_text()
    assert "plans are made with the cost quadratic:" in log, log
    assert lost(steps[-20:], "unseen") < lost(steps[:8], "unseen") / 2


def _mean_loss(model: nn.Module, names: list[str]) -> Tensor:
    """Of all tokens but the first of each sample."""
    assert isinstance(model, TinyModel)
    pushed = samples()
    losses = [
        model.sample_loss(torch.as_tensor(pushed[name].fields["input_ids"]))[1:] for name in names
    ]
    return torch.cat(losses).mean()
