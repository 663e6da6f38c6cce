"""Whether a DP rank pads micro-batches as they are planned."""

from rollout_dispatcher.errors import RankRefused
from rollout_dispatcher.protocol.versions import PADDING, Terms
from rollout_dispatcher.service.config.options import ServeConfig
from rollout_planner.types import Oversize, round_up


def check_padding(config: ServeConfig, terms: Terms, packed_length: int | None) -> None:
    """Raise RankRefused for one that would not, and say what to change."""
    multiple = config.sample_length_multiple
    if multiple > 1 and PADDING not in terms.capabilities:
        raise RankRefused(
            f"samples are planned for padding to multiples of {multiple} tokens, which this rank's "
            "release does not do; install a newer release of rollout-dispatcher where it runs, or "
            "start the dispatcher without --sample-length-multiple"
        )
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
