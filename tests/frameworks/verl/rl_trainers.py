"""verl's two RL trainers, as `import verl` leaves them, balance 64 rows over 4 ranks.

Prints JSON: excess of the micro-batches that `prepare_micro_batches` of verl's engines makes.
"""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls
from verl.utils import seqlen_balancing
from verl.utils import tensordict_utils as tu
from verl.workers.engine import utils
from verl.workers.utils.padding import left_right_2_no_padding

from rollout_planner import Quadratic
from rollout_planner.types import Sync, straggler_excess

LENGTHS = np.clip(np.random.default_rng(7).lognormal(6, 1, 64), 4, 4000).astype(int)
RANKS, BUDGET, MINI = 4, 8000, 32
CONFIG = OmegaConf.create(
    {
        "actor_rollout_ref": {
            "actor": {
                "strategy": "fsdp", "use_dynamic_bsz": True, "ppo_mini_batch_size": MINI // 2,
                "ppo_max_token_len_per_gpu": BUDGET,
            },
            "rollout": {"n": 2},
        },
        "trainer": {"critic_warmup": 0},
    }
)  # fmt: skip


def trainer(kind: type[Any]) -> Any:
    """One with the parts that balancing looks at; its workers would be on GPUs."""
    made = object.__new__(kind)
    made.config, made.use_critic, made.global_steps = CONFIG, False, 1
    made.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 0, 1, 1, 2, 2, 3, 3]})
    made.tokenizer = SimpleNamespace(eos_token_id=0)
    return made


def excess(rows_of: list[TensorDict]) -> float:
    """Of the micro-batches that the ranks cut of their rows."""
    works = []
    for rows in rows_of:
        tu.assign_non_tensor(rows, use_dynamic_bsz=True, max_token_len_per_gpu=BUDGET, sp_size=1)
        cut, _ = utils.prepare_micro_batches(rows)
        lengths = [part["input_ids"].offsets().diff().numpy() for part in cut]
        works.append([float(Quadratic()(own).sum()) for own in lengths])
    width = max(map(len, works))
    padded = [own + [0.0] * (width - len(own)) for own in works]
    return straggler_excess(np.array(padded), Sync.MICRO_STEP)


def batch(lengths: Any) -> DataProto:
    """Rows as rollout leaves them."""
    mask = (torch.arange(int(max(lengths))) < torch.tensor(lengths)[:, None]).long()
    rows = {"input_ids": mask, "attention_mask": mask, "position_ids": mask.cumsum(1)}
    return DataProto.from_single_dict(rows | {"response_mask": mask})


def ray_ppo() -> float:
    """The driver's plan, carried to the ranks and cut there."""
    rows, metrics = batch(LENGTHS), dict[str, float]()
    trainer(RayPPOTrainer)._balance_batch(rows, metrics)
    assert metrics["global_seqlen/mean"] == LENGTHS.sum() / RANKS
    return excess(tu.chunk_tensordict(left_right_2_no_padding(rows.to_tensordict()), RANKS))


def mini_batches(kind: type[Any]) -> list[float]:
    """Excess of each mini-batch that ranks take off their part of the order."""
    keys = [str(row) for row in range(len(LENGTHS))]
    tags = [{"seq_len": int(length)} for length in LENGTHS]
    meta = trainer(kind)._balance_batch(KVBatchMeta(keys=keys, tags=tags), {})
    rows = np.array([int(key) for key in meta.keys]).reshape(RANKS, -1, MINI // RANKS)
    assert sorted(rows.ravel()) == list(range(len(LENGTHS)))
    return [
        excess(
            [left_right_2_no_padding(batch(LENGTHS[own]).to_tensordict()) for own in rows[:, at]]
        )
        for at in range(rows.shape[1])
    ]


planned = ray_ppo()
balanced = mini_batches(get_trainer_cls("balanced"))
utils.rearrange_micro_batches = seqlen_balancing.rearrange_micro_batches  # verl's own again
print(json.dumps({"ray": planned, "sync": balanced, "own": mini_batches(PPOTrainerSync)}))
