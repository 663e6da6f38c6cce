"""The gradient of every loss of a dispatched step is what its formula says of the whole step.

A real dispatcher and real torchrun ranks, under DDP and FSDP2, on two ranks and on a mesh of
DP x CP whose four ranks' gradients are averaged. Steps have fillers, groups over several ranks,
groups that lost members, samples without a group; the last one is of one sample, of which some
losses count nothing. All losses come of one stream.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.harness import finish, running
from tests.support.server import serve
from tests.support.torchrun import torchrun_command
from tests.workers.normalisers.losses import (
    BATCH_GROUPS,
    LONGEST,
    LOST,
    NAMES,
    push_all,
    pushed,
    textbook,
)
from tests.workers.support.tiny_model import TinyModel

pytestmark = pytest.mark.e2e
TOLERANCE = 1e-9
#: Context parallel ranks for each of the two DP ranks.
CP = {"dp": 1, "dp x cp": 2}


@pytest.fixture(scope="module", params=list(CP))
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[list[dict[str, Any]]]:
    """What each rank saw of every step."""
    cp = CP[request.param]
    directory = tmp_path_factory.mktemp(f"cp{cp}")
    # Steps in order of arrival: the last one has the sample that is a group by itself.
    options = {"global_batch_groups": BATCH_GROUPS, "micro_batch_tokens": LONGEST, "window": 1}
    trainer = str(Path(__file__).parent / "train.py")
    command = [*torchrun_command(2 * cp, directory), trainer]
    with (
        serve(directory / "server", dp_size=2, **options) as endpoint,
        ThreadPoolExecutor() as pool,
        running(*command, endpoint, str(directory), str(cp)) as process,
    ):
        pushing = pool.submit(push_all, endpoint)
        finish(process)
        pushing.result(30)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2 * cp)]


def samples_of(ranks: list[list[dict[str, Any]]], step: int) -> list[str]:
    """Ids of a whole step, over the ranks that have a stream, without fillers."""
    leaders = ranks[:: len(ranks) // 2]
    batches = [batch for rank in leaders for batch in rank[step]["batches"]]
    return [name for batch in batches if not batch["filler"] for name in batch["ids"]]


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_is_that_of_the_formula(trained: list[list[dict[str, Any]]], name: str) -> None:
    samples = pushed()
    for step in range(len(trained[0])):
        model = TinyModel()
        chosen = [samples[one] for one in samples_of(trained, step)]
        textbook(name, model, chosen).backward()  # type: ignore[no-untyped-call]
        expected = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        assert step or expected.abs().max() > 1e-4, "nothing is learnt"
        for rank in trained:
            for trainer, gradients in rank[step]["gradients"].items():
                worst = np.abs(np.subtract(gradients[name], expected.numpy())).max()
                assert worst <= TOLERANCE, f"{trainer} is off by {worst}"


def test_the_steps_were_worth_the_test(trained: list[list[dict[str, Any]]]) -> None:
    leaders = trained[:: len(trained) // 2]
    batches = [batch for rank in leaders for step in rank for batch in step["batches"]]
    assert any(batch["filler"] for batch in batches)
    steps = [samples_of(trained, step) for step in range(len(trained[0]))]
    assert sorted(name for step in steps for name in step) == sorted(pushed())
    assert LOST not in pushed()
    assert len(steps[-1]) == 1
    last = [batch["filler"] for rank in leaders for batch in rank[-1]["batches"]]
    assert sorted(last) == [False, True], "no rank has nothing but fillers"
    samples = pushed()
    places = {
        (samples[name].group_id, dp_rank)
        for dp_rank, rank in enumerate(leaders)
        for batch in rank[0]["batches"]
        for name in batch["ids"]
    }
    assert len(places) > len({group for group, _ in places}), "no group is on two ranks"
    gradients = trained[0][0]["gradients"]["ddp"]
    for one in NAMES:
        for other in NAMES:
            apart = np.abs(np.subtract(gradients[one], gradients[other])).max()
            assert one == other or apart > 1000 * TOLERANCE, f"{one} and {other} are one"
