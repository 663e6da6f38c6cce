"""The blocks of docs/planner.md for the drivers of NeMo-RL and TorchSpec, run on their own code.

Both are on no package index: clones in build/bench/sources, as RL and TorchSpec. The block for verl
is run on its wheel, by `make test-frameworks ONLY=verl`.
"""

import asyncio
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout_planner import Quadratic
from rollout_planner.types import Sync, straggler_excess
from tests.peers.adapters import torchspec
from tests.peers.loading import load
from tests.peers.roster import SOURCES
from tests.support.seams import SEAMS, ReplayBuffer, at_hand, module, shown

LENGTHS = np.clip(np.random.default_rng(7).lognormal(6, 1, 512), 4, 4000).astype(int).tolist()
#: Modules of NeMo-RL that need GPUs, or packages that are not here.
HEAVY = (
    "ray", "tensordict", "nemo_rl.algorithms.loss.interfaces", "nemo_rl.data_plane.adapters",
    "nemo_rl.data_plane.column_io",
    "nemo_rl.distributed.batched_data_dict", "nemo_rl.models.policy.lm_policy",
    "nemo_rl.utils.flops_tracker", "nemo_rl.utils.timer",
)  # fmt: skip


def clone(folder: str) -> pytest.MarkDecorator:
    """Skips, and says so, where this clone is not there."""
    place = SOURCES / folder
    return pytest.mark.skipif(not place.exists(), reason=f"{place} is not there: clone it")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that the block is put into; `import` finds what is there, and the seams."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(SEAMS))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if name == "balanced" or name.startswith(("nemo_rl", "torchspec")):
            del sys.modules[name]


@clone("RL")
def test_nemo_rl_chooses_prompt_groups_and_shards_them_with_the_block(path: Path) -> None:
    (path / "balanced.py").write_text(shown("NeMo-RL's driver"))
    root, samplers = SOURCES / "RL", "nemo_rl.algorithms.async_utils.staleness_sampler"
    policy = load(root, "nemo_rl.models.policy.tq_policy", HEAVY)
    needs = ("nemo_rl.algorithms.async_utils.replay_buffer", "nemo_rl.data_plane")
    theirs = load(root, samplers, needs)
    names = ("nemo_rl", "nemo_rl.models", "nemo_rl.algorithms", "nemo_rl.algorithms.async_utils")
    given = {name: module(name) for name in names} | {
        "nemo_rl.models.policy": module("policy", tq_policy=policy),
        "nemo_rl.models.policy.tq_policy": policy,
        "nemo_rl.data_plane": module("data_plane", preshard=None),
        samplers: theirs,
    }
    asked = re.findall(r"^    (\w+): (.*)$", shown("NeMo-RL's driver", "yaml"), re.MULTILINE)
    config = theirs.CustomSamplerConfig(
        **{name: int(value) if value.isdigit() else value for name, value in asked}
    )
    assert config.name == "custom"
    buffer = ReplayBuffer()
    for at in range(0, len(LENGTHS), 4):
        ids = [str(row) for row in range(at, at + 4)]
        meta = policy.KVBatchMeta(
            partition_id="train", task_name="train", sample_ids=ids,
            sequence_lengths=LENGTHS[at : at + 4],
        )  # fmt: skip
        buffer.add(meta, 7)
    with at_hand(given):
        sampler = theirs.create_sampler(buffer, config)
    chosen, groups = asyncio.run(
        sampler.select(current_train_weight=7, min_prompt_groups=64, max_prompt_groups=64)
    )
    assert groups == 64
    assert len(buffer.meta_list) == 64

    dealt: list[Any] = []
    trainer = object.__new__(policy.TQPolicy)
    vars(trainer).update(
        use_dynamic_batches=False, use_sequence_packing=True,
        sequence_packing_args={"sequence_length_pad_multiple": 1},
        cfg={"sequence_packing": {"train_mb_tokens": 8000}}, flops_tracker=None,
        _router_replay_enabled=False,
        sharding_annotations=SimpleNamespace(get_axis_size=lambda _: 8),
        worker_group=SimpleNamespace(
            run_all_workers_sharded_data=lambda *_, meta, **__: dealt.extend(meta),
            get_all_worker_results=lambda _: None,
        ),
    )  # fmt: skip
    trainer.train_microbatches_from_meta(chosen)
    assert sorted(name for meta in dealt for name in meta.sample_ids) == sorted(chosen.sample_ids)
    work = np.array(
        [
            [
                Quadratic()(np.array(meta.sequence_lengths[start:stop])).sum()
                for start, stop in meta.extra_info["micro_batch_indices"][0]
            ]
            for meta in dealt
        ]
    )
    assert max(max(meta.extra_info["micro_batch_lengths"][0]) for meta in dealt) <= 8000
    assert straggler_excess(work, Sync.MICRO_STEP) < 0.02


@clone("TorchSpec")
def test_torchspec_dispatches_a_planned_step_with_the_block(path: Path) -> None:
    """Its training script is a stand-in, whose controller is the real one."""
    shutil.copy(SEAMS / "torchspec.py", path / "torchspec_dispatch.py")
    (path / "train.py").write_text(shown("TorchSpec's controller"))
    ray = module("ray", remote=actor_of)
    controller = torchspec.controller("ray.util", ray=ray)
    trained: list[list[list[str]]] = []

    def train(args: Any) -> None:
        made = controller.__ray_metadata__.modified_class(args, 4)
        made.push_inference_results([result(row) for row in range(40)])
        assert [made.try_dispatch_batch() for _ in range(5)] == [True] * 4 + [False]
        for queue in made.train_queues:
            keys = [queue.get().mooncake_key for _ in range(queue.qsize())]
            trained.append([keys[at : at + 2] for at in range(0, 8, 2)])

    script = module(
        "torchspec.train_entry", AsyncTrainingController=controller,
        parse_config=lambda: SimpleNamespace(global_batch_size=32, per_dp_rank_batch_size=2),
        train_async_no_generation=train,
    )  # fmt: skip
    with at_hand({"torchspec": module("torchspec", train_entry=script), script.__name__: script}):
        runpy.run_path(str(path / "train.py"), run_name="__main__")
    assert sorted(int(row) for rank in trained for part in rank for row in part) == list(range(32))
    longest = [[max(LENGTHS[int(row)] for row in part) for part in rank] for rank in trained]
    in_turn = [
        [max(LENGTHS[8 * at + rank], LENGTHS[8 * at + 4 + rank]) for at in range(4)]
        for rank in range(4)
    ]
    assert padded(longest) < 0.9 * padded(in_turn)


def padded(longest: list[list[int]]) -> float:
    """Tokens that ranks are busy with: each micro-step lasts as its longest sample, in buckets."""
    return float((-(-np.array(longest) // 256) * 256).max(axis=0).sum())


def actor_of(cls: type[Any]) -> Any:
    """Ray's decorator, as far as the block looks into it; tests/frameworks/ray has the real one."""
    return SimpleNamespace(__ray_metadata__=SimpleNamespace(modified_class=cls))


def result(row: int) -> SimpleNamespace:
    """A sample of TorchSpec's inference."""
    return SimpleNamespace(
        data_id=str(row), mooncake_key=str(row), tensor_shapes={"input_ids": (LENGTHS[row],)},
        tensor_dtypes=None, packed_loss_mask=None,
    )  # fmt: skip
