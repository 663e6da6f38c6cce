"""transformers: `BatchRebalanceSampler`, padded micro-batches of any number of samples."""

from functools import partial
from pathlib import Path
from typing import Any

from tests.peers.loading import Stub, load, version_of
from tests.peers.problem import Corner, Peer, Problem, Schedule, Unanswered

_STUBS = ("transformers.integrations", "transformers.integrations.deepspeed")


def peer(folder: Path) -> Peer | None:
    """From the wheel unpacked in `folder`; None if it is not there."""
    if (found := module(folder)) is None:
        return None
    version = version_of(folder, "transformers")
    return Peer("transformers", version, {Corner.PADDED: partial(_padded, found)})


def module(folder: Path) -> Any:
    """The file with its samplers; None if it is not there."""
    if not (folder / "transformers/trainer_pt_utils.py").exists():
        return None
    utils = Stub("transformers.utils")
    vars(utils)["is_torch_available"] = lambda: True
    return load(folder, "transformers.trainer_pt_utils", _STUBS, {utils.__name__: utils})


def _padded(module: Any, problem: Problem) -> Schedule:
    """What all ranks' samplers yield for one global batch.

    Each sampler computes this and yields its own rank's part, so once is what it costs a rank.
    """
    n, M = len(problem.lengths), problem.micro_batches
    if M is None:
        raise Unanswered("it needs a number of micro-batches")
    try:
        sampler = module.BatchRebalanceSampler(
            problem.lengths.tolist(), n, problem.dp_size, M, shuffle=False
        )
    except AssertionError as error:
        raise Unanswered(f"not {n} samples on {problem.dp_size} x {M} micro-batches") from error
    found: Schedule = sampler._assign(list(range(n)), sampler.lengths)
    return found
