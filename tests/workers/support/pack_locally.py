"""A rank that packs its own samples and writes down what came of it; run by torchrun.

pack_locally.py DIRECTORY
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rollout_workers import pack_local

LENGTHS = ([9, 8, 7, 6], [5, 4], [2])
BUDGET = 10


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the class and text of its error."""
    try:
        return call()
    except Exception as error:
        return [type(error).__name__, str(error)]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    own, group = LENGTHS[rank], pairs[rank // 2]
    too_long = own if rank else [11]
    results = {
        "all": outcome(lambda: pack_local(own, BUDGET)),
        "pair": outcome(lambda: pack_local(own, BUDGET, group=group)),
        "multiple": outcome(lambda: pack_local(own, BUDGET, group=group, multiple=3, minimum=2)),
        "too long": outcome(lambda: pack_local(too_long, BUDGET, group=group)),
        "wrong": outcome(lambda: pack_local(own if rank else ["x"], BUDGET, group=group)),
        "full": outcome(lambda: pack_local(own, BUDGET, fillers=False)),
        "full pair": outcome(lambda: pack_local(own[:2], BUDGET, group=group, fillers=False)),
        "after": outcome(lambda: pack_local(own, BUDGET)),
    }
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
