"""A sampler for TransferQueue: our selection and split in its controller. TransferQueue 0.1.11.

    sampler = WindowSampler(dp_size=8, micro_batch_size=2)
    conf = {"controller": {"sampler": sampler, "polling_mode": True}}
    tq.init(OmegaConf.create(conf, flags={"allow_objects": True}))

TransferQueue hands out the oldest samples that are ready, to whichever rank asks. Here the first
rank that asks for a batch has it planned for all: out of `window_multiple` batches of what is ready
those samples that balance best, split so that ranks work alike in every micro-batch. Ranks ask with
their `dp_rank` and `batch_index`, as `StreamingDataset` does, for `batch_size` samples each, and
cut these into micro-batches in the order that they come in. Whoever puts samples says how long they
are: `tags=[{"total_lengths": 812}, ...]`, as for TransferQueue's own SeqlenBalancedSampler.
"""

from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
from transfer_queue.sampler import BaseSampler

from rollout_planner import Quadratic, plan
from rollout_planner.types import PlanConfig, Window

# integration: begin


class WindowSampler(BaseSampler):
    """Selects from a window, for all ranks; passes no sample over more than `max_skips` times."""

    def __init__(
        self, dp_size: int, micro_batch_size: int, window_multiple: float = 2.0, max_skips: int = 6
    ) -> None:
        super().__init__()
        self.dp_size, self.micro_batch_size = dp_size, micro_batch_size
        self.window_multiple, self.max_skips = window_multiple, max_skips

    def sample(
        self, ready_indexes: list[int], batch_size: int, *_: Any, partition: Any = None,
        task_name: str = "", partition_id: str = "", dp_rank: int = 0, batch_index: int = 0,
        **__: Any,
    ) -> tuple[list[int], list[int]]:  # fmt: skip
        tasks = self._states.setdefault(partition_id, {})  # cleared and saved by BaseSampler
        known = tasks.setdefault(task_name, {rank: {} for rank in range(self.dp_size)})
        if batch_index not in known[dp_rank]:
            given = {at for rank in range(self.dp_size) for at in chain(*known[rank].values())}
            ready = [at for at in sorted(ready_indexes) if at not in given]
            batches = self.split(ready, batch_size, partition, known.setdefault("skips", Counter()))
            for rank, own in enumerate(batches):
                known[rank][batch_index] = own
        mine = known[dp_rank].get(batch_index, [])
        return list(mine), list(mine)

    def split(
        self, ready: list[int], batch_size: int, partition: Any, skips: Counter[int]
    ) -> list[list[int]]:
        """Of a batch what each rank gets; nothing while there are too few samples."""
        take = batch_size * self.dp_size
        if len(ready) < take:
            return []
        there = ready[: round(take * self.window_multiple)]
        tags = partition.get_custom_meta(there)
        window = Window(
            tokens=np.array([tags[at]["total_lengths"] for at in there]),
            skips=np.array([skips[at] for at in there]),
            group=np.full(len(there), -1),
            must_go=np.zeros(len(there), bool),
        )
        config = PlanConfig(
            self.dp_size, take, Quadratic(), micro_batch_size=self.micro_batch_size,
            max_skips=self.max_skips,
        )  # fmt: skip
        found = plan(window, config, take=take)
        skips.update({*there} - {there[at] for at in found.chosen})
        return [[there[at] for part in rank for at in part] for rank in found.micro_batches]


# integration: end
