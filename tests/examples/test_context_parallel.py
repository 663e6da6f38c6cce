"""`examples/context_parallel.py`: samples over several ranks train as in one process."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from examples.context_parallel import VOCABULARY, Transformer, make_model
from tests.examples.run import finish, push, torchrun
from tests.support.server import ServeProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

STEPS, BATCH, BUDGET = 5, 12, 48
TOLERANCE = 1e-9


def rollouts() -> list[dict[str, Any]]:
    """Most of 2 to 40 tokens; of each step one has room on two ranks, and one on four alone."""
    random = np.random.default_rng(5)
    found = []
    for number in range(STEPS * BATCH):
        longest = {3: (60, 90), 7: (130, 180)}.get(number % BATCH, (2, 41))
        tokens = int(random.integers(*longest))
        ids, mask = random.integers(0, VOCABULARY, tokens), random.random(tokens) < 0.6
        found.append({"input_ids": ids, "loss_mask": mask})
    return found


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
    return scaled_dot_product_attention(query, key, value, is_causal=True)[0].transpose(0, 1)


def one_process() -> Transformer:
    """Each step as one batch, sample by sample, with the loss as a textbook has it."""
    model, samples = make_model(), rollouts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        chosen = samples[step * BATCH : (step + 1) * BATCH]
        total, loss = sum(int(each["loss_mask"][1:].sum()) for each in chosen), torch.zeros(())
        for each in chosen:
            ids, mask = torch.as_tensor(each["input_ids"]), torch.as_tensor(each["loss_mask"][1:])
            logits = model(ids, torch.arange(len(ids)), causal)[:-1]
            loss = loss + cross_entropy(logits, ids[1:], reduction="none")[mask].sum() / total
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return dict(one_process().state_dict())


@pytest.mark.parametrize(
    ("options", "is_stored"),
    [(["--fsdp"], False), ([], True), (["--slicing", "contiguous"], False)],
    ids=["FSDP2", "DDP, samples in a store", "DDP, contiguous"],
)
def test_four_ranks_that_share_samples_train_as_one_process(
    tmp_path: Path,
    options: list[str],
    is_stored: bool,
    expected: dict[str, torch.Tensor],
) -> None:
    stored: dict[str, Any] = {}
    if is_stored:
        (payloads := tmp_path / "payloads").mkdir()
        stored = {"payload_stores": f"file://{payloads}", "inline_limit": "200B"}
        stored["journal_dir"] = tmp_path / "journal"
    with ServeProcess(
        tmp_path, dp_size=4, global_batch_size=BATCH, micro_batch_tokens=BUDGET, window=1,
        buffer_capacity=STEPS * BATCH, max_split=4, **stored,
    ) as server:  # fmt: skip
        push(server, rollouts())
        assert not is_stored or any(payloads.iterdir())
        where = ("--endpoint", server.endpoint, "--weights", tmp_path / "weights.pt")
        with torchrun(tmp_path, 4, "context_parallel.py", *where, *options) as trainers:
            printed = finish(trainers)
    assert set(re.findall(r"(\d) ranks", printed)) == {"1", "2", "4"}
    assert len(set(re.findall(r"step \d+", printed))) == STEPS
    counted = sum(int(found) for found in re.findall(r"(\d+) tokens", printed))
    fillers = counted - sum(len(each["input_ids"]) for each in rollouts())
    assert 0 <= fillers < 4 * STEPS, "each token is on one rank; a filler has one"
    for name, weights in torch.load(tmp_path / "weights.pt").items():
        worst = float((weights - expected[name]).abs().max())
        assert worst <= TOLERANCE, f"{name} is off by {worst}"
    assert (expected["head.bias"] - make_model().head.bias).abs().max() > 0.01
