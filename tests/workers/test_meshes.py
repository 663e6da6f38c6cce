"""Which ranks are data parallel where torch's meshes have several dimensions.

Real torchrun ranks: four of them on a mesh of 2 x 2, which is refused on all of them unless they
name the DP ranks.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout_workers import RolloutProducer
from rollout_workers.process_group import Mesh, advice
from tests.e2e.harness import finish, running
from tests.support.server import serve
from tests.support.torchrun import torchrun_command

RANKS = 4


@pytest.mark.parametrize(
    ("names", "sizes", "plain"),
    [
        (("dp",), (4,), True),
        (("0",), (4,), True),
        (("pp", "dp", "tp"), (1, 4, 1), True),
        (("world",), (2,), True),
        (("pp", "tp"), (1, 1), True),
        (("dp", "tp"), (2, 2), False),
        (("0", "1"), (2, 2), False),
        (("dp_replicate", "dp_shard"), (2, 2), False),
        (("dp", "tp"), (1, 4), False),
        (("tp",), (4,), False),
        (("pp",), (2,), False),
    ],
)
def test_a_mesh_of_one_real_dimension_says_nothing_against_the_default_group(
    names: tuple[str, ...], sizes: tuple[int, ...], plain: bool
) -> None:
    assert Mesh(names, sizes).is_plain(4) is plain


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("dp", "tp"), "dp_dims='dp'"),
        (("data", "tp"), "dp_dims='data'"),
        (("0", "1"), "dp_dims='dp'"),
        (("dp_replicate", "dp_shard", "tp"), "dp_dims=('dp_replicate', 'dp_shard')"),
        (("dp_replicate", "dp_shard"), "dp_dims=('dp_replicate', 'dp_shard')"),
    ],
)
def test_the_advice_names_the_data_parallel_dimensions(
    names: tuple[str, ...], expected: str
) -> None:
    assert expected in advice(Mesh(names, (2,) * len(names)))


def test_no_mesh_is_looked_for_in_a_process_without_torch_distributed() -> None:
    code = (
        "from rollout_workers.process_group import ambiguous_mesh; assert ambiguous_mesh(4) is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The errors of each of four ranks, and what it got once it had named the DP ranks."""
    directory = tmp_path_factory.mktemp("mesh")
    script = str(Path(__file__).parent / "support" / "train_mesh.py")
    with serve(directory / "server", dp_size=2, global_batch_size=4, micro_batch_size=1) as at:
        with RolloutProducer(at) as producer:
            for index in range(4):
                producer.push({"input_ids": [index] * 3})
            producer.end_stream()
        with running(*torchrun_command(RANKS, directory), script, at, str(directory)) as process:
            finish(process)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.e2e
def test_meshes_of_one_real_dimension_are_fine(results: list[dict[str, Any]]) -> None:
    assert [rank["plain"] for rank in results] == [[rank, rank] for rank in range(RANKS)]


@pytest.mark.e2e
def test_a_stream_over_all_ranks_of_a_mesh_is_refused_on_each(
    results: list[dict[str, Any]],
) -> None:
    for rank in results:
        assert "(dp=2, tp=2)" in rank["stream"]
        assert "pass mesh= with the whole mesh and dp_dims='dp', on every rank" in rank["stream"]


@pytest.mark.e2e
def test_a_sampler_over_all_ranks_of_a_mesh_is_refused_unless_it_has_the_mesh(
    results: list[dict[str, Any]],
) -> None:
    for index, rank in enumerate(results):
        assert "pass mesh= with the whole mesh and dp_dims='dp'" in rank["sampler"]
        assert rank["drawn"] == results[index // 2 * 2]["drawn"]
    assert sorted(results[0]["drawn"] + results[2]["drawn"]) == [0, 1, 2, 3]


@pytest.mark.e2e
def test_a_position_that_the_default_group_does_not_have_is_refused_on_each(
    results: list[dict[str, Any]],
) -> None:
    """The ranks would wait for each other in a broadcast in which others than they take part."""
    for index, rank in enumerate(results):
        expected = f"this is DP rank {index // 2} of 2, but rank {index} of 4 in the default"
        assert expected in rank["position"]


@pytest.mark.e2e
def test_dp_leaders_share_the_samples_and_tp_peers_see_those_of_their_leader(
    results: list[dict[str, Any]],
) -> None:
    seen = [rank["seen"] for rank in results]
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert sorted(map(tuple, seen[0] + seen[2])) == [(index,) * 3 for index in range(4)]


@pytest.mark.e2e
def test_ranks_of_one_place_in_their_replicas_train_samples_together(tmp_path: Path) -> None:
    settings = {"dp_size": 2, "global_batch_size": 3, "micro_batch_tokens": 32, "window": 1}
    with serve(tmp_path, **settings, max_split=2) as endpoint:
        with RolloutProducer(endpoint) as producer:
            for tokens in (50, 9, 7):
                producer.push({"input_ids": [1] * tokens}, sample_id=str(tokens))
            producer.end_stream()
        trainer = str(Path(__file__).parent / "support" / "train_blocks.py")
        command = [*torchrun_command(RANKS, tmp_path), trainer, endpoint, str(tmp_path)]
        with running(*command) as process:
            finish(process)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    for place, (leader, peer) in enumerate((ranks[:2], ranks[2:])):
        assert leader[0] == [[0, 2], place, ["50"], [50]]
        assert peer[0] == [[1, 3], place, ["50"], [50]]
        assert peer[1:] == leader[1:]
    assert sorted(batch[2] for batch in (ranks[0][1], ranks[2][1])) == [["7"], ["9"]]
