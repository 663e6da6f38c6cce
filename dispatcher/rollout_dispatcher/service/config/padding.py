"""Whether a DP rank has room for micro-batches as they are planned."""

from rollout_dispatcher.errors import RankRefused
from rollout_dispatcher.service.config.options import ServeConfig
from rollout_planner.types import Oversize, round_up


def check_padding(config: ServeConfig, packed_length: int | None) -> None:
    """Raise RankRefused for one that has not, and say what to change."""
    most, why = largest_micro_batch(config)
    if packed_length is not None and packed_length < most:
        raise RankRefused(
            f"micro-batches are to be padded to packed_length={packed_length} tokens, and may have "
            f"{most} ({why}); make the stream with packed_length={most} or more, or lower that"
        )


def largest_micro_batch(config: ServeConfig) -> tuple[int, str]:
    """Tokens that a packed micro-batch may have, its samples padded, and by which settings."""
    budget, limit = config.micro_batch_tokens, f"--max-sample-tokens {config.max_sample_tokens}"
    longest = round_up(config.max_sample_tokens, config.sample_length_multiple)
    if budget is None:
        size = config.micro_batch_size or 1
        return size * longest, f"--micro-batch-size {size} and {limit}"
    if config.oversize is Oversize.ALONE and longest > budget:
        return longest, f"--oversize alone and {limit}"
    return budget, f"--micro-batch-tokens {budget}"
