"""Built-in profiles: they are what the traces say, and samples of them are too."""

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.simulate.trace import PROBABILITIES, PROFILES, sample_lengths
from rollout_planner.types import IntArray

TRACES = {
    "lineage": "lineage_open_reasoning",
    "reasoning-gym": "reasoning_gym_rlvr_g3",
    "azure-conv": "azure2023_conv",
    "azure-code": "azure2023_code",
    "deepseek-r1-arc": "deepseek_r1_arc_g2",
    "tau-airline": "tau_airline_agent_g4",
}


def trace(root: Path, name: str) -> IntArray:
    path = root.parent / "shared" / "traces" / f"{TRACES[name]}.csv.gz"
    if not path.exists():
        pytest.skip(f"the trace behind {name} is not beside this checkout")
    with gzip.open(path, "rt") as file:
        rows = [
            int(row["prompt_tokens"]) + int(row["response_tokens"]) for row in csv.DictReader(file)
        ]
    return np.array(rows, dtype=np.int64)


def ks_distance(a: IntArray, b: IntArray) -> float:
    grid = np.unique(np.concatenate([a, b]))
    left = np.searchsorted(np.sort(a), grid, side="right") / len(a)
    right = np.searchsorted(np.sort(b), grid, side="right") / len(b)
    return float(np.abs(left - right).max())


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_ascending_and_names_its_source_and_licence(name: str) -> None:
    profile = PROFILES[name]
    assert len(profile.quantiles) == len(PROBABILITIES)
    assert (np.diff(profile.quantiles) >= 0).all()
    assert profile.quantiles[0] >= 1
    assert profile.source
    assert profile.licence


@pytest.mark.parametrize("name", PROFILES)
def test_samples_are_distributed_as_the_trace_is(root: Path, name: str) -> None:
    real = trace(root, name)
    drawn = sample_lengths(name, 200_000, np.random.default_rng(1))
    assert ks_distance(real, drawn) < 0.015
    assert drawn.mean() == pytest.approx(real.mean(), rel=0.01)
    assert drawn.std() == pytest.approx(real.std(), rel=0.03)
    assert real.min() <= drawn.min()
    assert drawn.max() <= real.max()


def test_the_same_seed_gives_the_same_lengths() -> None:
    first = sample_lengths("lineage", 100, np.random.default_rng(7))
    again = sample_lengths("lineage", 100, np.random.default_rng(7))
    assert (first == again).all()


def test_scaling_shrinks_but_never_to_nothing() -> None:
    drawn = sample_lengths("lineage", 10_000, np.random.default_rng(1), scale=1 / 2000)
    assert drawn.min() == 1
    assert drawn.max() <= 67024 / 2000 + 1


def test_an_unknown_profile_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match="reasoning-gym"):
        sample_lengths("linage", 1, np.random.default_rng(1))
