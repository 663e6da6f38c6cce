"""The training benchmark compares what it says it does, and still runs."""

from pathlib import Path

import numpy as np
import pytest

from tests.bench.training.cases import Case, measure
from tests.bench.training.orders import ORDERS, Work, packed
from tests.bench.training.rows import Measured, beside, medians
from tests.peers.adapters.verl import load_karmarkar_karp

LENGTHS = np.random.default_rng(5).lognormal(4, 0.8, 64).astype(int).clip(2, 400).tolist()
WORK = Work(LENGTHS, batch=16, ranks=2, budget=512, cost="quadratic:1,500,0", seed=3)


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_trains_each_sample_once_within_the_budget(name: str) -> None:
    if name == "verl-kk" and load_karmarkar_karp() is None:
        pytest.skip("verl is not here: make build/bench/peers/.unpacked")
    steps = list(ORDERS[name](WORK))
    assert len(steps) == 4
    seen = []
    for shares in steps:
        assert [len(share) for share in shares] == [8, 8]
        for share in shares:
            batches = packed(share, WORK)
            assert sorted(index for batch in batches for index in batch) == sorted(share.tolist())
            assert all(sum(LENGTHS[index] for index in batch) <= 512 for batch in batches)
            fewest = -(-sum(LENGTHS[index] for index in share) // 512)
            assert fewest <= len(batches) <= fewest + 1
            seen += share.tolist()
    assert sorted(seen) == list(range(64))


def test_the_dataloader_takes_samples_as_they_come() -> None:
    first = next(ORDERS["dataloader"](WORK))
    assert [share.tolist() for share in first] == [[*range(0, 16, 2)], [*range(1, 16, 2)]]


def test_grouped_by_length_a_step_has_like_lengths() -> None:
    lengths = np.random.default_rng(0).permutation(np.arange(2, 642))
    many = Work(lengths.tolist(), 16, 2, 1024, "tokens", 1)

    def spread(name: str) -> float:
        return float(np.mean([lengths[np.concatenate(step)].std() for step in ORDERS[name](many)]))

    assert spread("group-by-length") < 0.3 * spread("dataloader")


def test_figures_are_medians_and_stand_beside_the_dataloader_of_their_case() -> None:
    repetitions = [
        {
            "dataloader": Measured(rate, 0.3, 0.0),
            "ours": Measured(rate * 1.2, 0.1, 0.01),
            "slow:dataloader": Measured(50.0, 0.0, 0.5),
            "slow:ours": Measured(50.0, 0.0, 0.5),
        }
        for rate in (100.0, 300.0, 110.0)
    ]
    rows = {row["name"]: row for row in medians(repetitions)}
    assert rows["dataloader"]["tokens_per_second"] == 110
    assert rows["ours"]["of_dataloader"] == pytest.approx(1.2)
    assert rows["slow:ours"]["of_dataloader"] == 1
    assert beside("slow:ours") == "slow:dataloader"


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_rows_train_in_turn_on_the_same_tokens(tmp_path: Path) -> None:
    work = Work(LENGTHS[:32], 16, 2, 512, "quadratic:1,500,0", 3)
    found = measure(Case("short", ("dataloader", "ours-window-1", "ours")), work, tmp_path)
    assert list(found) == ["short:dataloader", "short:ours-window-1", "short:ours"]
    for row in found.values():
        assert row.tokens_per_second > 0
        assert 0 <= row.wait_share < 1
    for name in ("dataloader", "ours-window-1", "ours"):
        records = [path.read_text().splitlines() for path in tmp_path.glob(f"{name}.rank*.jsonl")]
        assert [len(lines) for lines in records] == [2, 2]
