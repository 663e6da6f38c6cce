"""Totals over the DP ranks: the same on all of them, or an error on all of them, and no hang."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from rollout_dispatcher.errors import ConfigError
from rollout_workers import Loss, MicroBatchStream, RolloutProducer
from tests.e2e.harness import finish, running
from tests.support.server import serve

DIFFER = "PeerFailed: the DP ranks do not take the same total"
SHAPES = [f"reduce_total of [{size}] in step 1 ({size} long)" for size in (1, 2)]
WEIGHTS = ([0.5, 0.25], [0.0, -1.0], [1.0, 1.0], [0.0, 2.0])


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("totals")
    options = {"dp_size": 2, "global_batch_size": 2, "micro_batch_size": 1}
    options |= {"max_open_steps": 2, "buffer_capacity": 8}
    with ExitStack() as stack:
        endpoint = stack.enter_context(serve(folder / "server", strategy="round-robin", **options))
        with RolloutProducer(endpoint) as producer:
            for index, weights in enumerate(WEIGHTS):
                producer.push({"input_ids": [1, 2], "kl": weights}, sample_id=f"s{index}")
            producer.end_stream()
        script = str(Path(__file__).parent / "ranks.py")
        arguments = [str(folder / "store"), endpoint, str(folder)]
        ranks = [
            stack.enter_context(running(sys.executable, script, str(rank), *arguments))
            for rank in range(2)
        ]
        lines = [finish(rank).splitlines() for rank in ranks]
    return [dict(line.split(": ", 1) for line in found if ": " in line) for found in lines]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("finding", "expected"),
    [
        ("sum", ["[ 2. 20.]"] * 2),
        ("again", ["[2.]"] * 2),
        ("next step", [f"[{2 / 3}]"] * 2),  # first tokens are no targets
        ("total", ["4.0 [[2.0], [2.0]]"] * 2),
        (
            "failed",
            [
                "ZeroDivisionError: float division by zero",
                "PeerFailed: numbers: DP rank 0 failed: ZeroDivisionError: float division by zero",
            ],
        ),
        ("length", [f"{DIFFER}: DP rank 0 takes it (1 long); DP rank 1 takes it (2 long)"] * 2),
        (
            "what",
            [f"{DIFFER}: DP rank 0 takes rank 0 (1 long); DP rank 1 takes rank 1 (1 long)"] * 2,
        ),
        ("shapes", [f"{DIFFER}: DP rank 0 takes {SHAPES[0]}; DP rank 1 takes {SHAPES[1]}"] * 2),
    ],
)
def test_every_rank_leaves_with_the_same_or_with_an_error(
    heard: list[dict[str, str]], finding: str, expected: Sequence[str]
) -> None:
    assert [rank[finding] for rank in heard] == list(expected)


@pytest.mark.e2e
def test_weights_of_one_rank_that_are_none_end_the_step_on_all(
    heard: list[dict[str, str]],
) -> None:
    said = "kl of sample s1 is -1 at token 1; the weights of loss kl are numbers from 0 on"
    assert sorted(rank["step"].partition(":")[0] for rank in heard) == [
        "PeerFailed",
        "SampleRefused",
    ]
    assert all(rank["step"].endswith(said) for rank in heard)


@pytest.mark.e2e
def test_a_rank_that_waits_hears_that_its_stream_has_ended(heard: list[dict[str, str]]) -> None:
    assert heard[0]["fenced"] == "GenerationFenced: DP rank 1 was lost"


def test_without_a_group_of_the_dp_ranks_there_is_no_total() -> None:
    kl = {"kl": Loss(weights="kl_mask")}
    with pytest.raises(ConfigError, match=r"losses=\['kl'\] .* over 2 DP ranks, .*init_process_gr"):
        MicroBatchStream("unix:/nowhere", dp_rank=1, dp_size=2, generation=1, losses=kl)
