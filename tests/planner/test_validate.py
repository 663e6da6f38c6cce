"""Claims about config checks: what cannot work is refused with the remedy in the message."""

from dataclasses import replace

import pytest

from rollout_dispatcher.errors import ConfigError
from rollout_planner import tokens, validate_config
from rollout_planner.types import Grouping, Layout, PlanConfig

GOOD = PlanConfig(dp_size=8, dispatch_batch_size=64, cost=tokens, micro_batch_size=2)
BUDGET = replace(GOOD, micro_batch_size=None, micro_batch_tokens=4096)


def test_a_consistent_config_passes() -> None:
    validate_config(GOOD)
    validate_config(replace(GOOD, micro_batch_multiple=2), window_multiple=2.5)
    validate_config(replace(GOOD, min_micro_batches=4))
    validate_config(replace(BUDGET, dispatch_batch_size=61))
    validate_config(replace(BUDGET, layout=Layout.PADDED))
    validate_config(replace(BUDGET, min_micro_batches=16))
    validate_config(replace(BUDGET, max_skips=1, outlier_max_skips=4), window_multiple=1.25)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(GOOD, dp_size=0), "dp_size is 0; it must be at least 1"),
        (replace(GOOD, dispatch_batch_size=0), "dispatch_batch_size is 0"),
        (replace(GOOD, micro_batch_multiple=0), "micro_batch_multiple is 0"),
        (replace(BUDGET, max_split=3), "max_split is 3; .* use 1, 2, 4, 8"),
        (replace(BUDGET, max_split=16), "max_split is 16, .* 8 DP ranks; lower it to 8"),
        (replace(GOOD, max_split=2), "there is no micro_batch_tokens, .* set max_split to 1"),
        (
            replace(BUDGET, max_split=2, layout=Layout.PADDED, pipeline_stages=2, rank_tokens=9999),
            "there is layout padded, pipeline_stages 2, rank_tokens 9999, which it cannot heed",
        ),
        (replace(BUDGET, max_split=2, grouping=Grouping.RANK), "groups rank"),
        (replace(GOOD, min_micro_batches=0), "min_micro_batches is 0"),
        (
            replace(GOOD, min_micro_batches=5, micro_batch_multiple=2),
            "makes 4 micro-batches .* use dispatch_batch_size 96 or more, .* lower .* to 4$",
        ),
        (replace(GOOD, sample_length_multiple=0), "sample_length_multiple is 0"),
        (
            replace(GOOD, micro_batch_size=None, micro_batch_tokens=9, sample_length_multiple=16),
            "micro_batch_tokens is 9, .* multiple of 16 .* raise it to 16 or more",
        ),
        (replace(GOOD, micro_batch_size=0), "micro_batch_size is 0"),
        (replace(GOOD, micro_batch_size=None), "neither is set"),
        (replace(GOOD, micro_batch_tokens=10), "both are set"),
        (replace(GOOD, micro_batch_size=None, micro_batch_tokens=0), "micro_batch_tokens is 0"),
        (
            replace(GOOD, dispatch_batch_size=60),
            "multiple of 16 .* use 48 or 64, or dp_size 6 or 10$",
        ),
        (replace(GOOD, dispatch_batch_size=6), "; use 16, or dp_size 3$"),
        (replace(GOOD, dp_size=3, dispatch_batch_size=8), "; use 6 or 12, or dp_size 2 or 4$"),
        (replace(GOOD, dispatch_batch_size=7), "; use 16$"),
        (replace(GOOD, micro_batch_multiple=3), "x micro_batch_multiple 3; use 48 or 96"),
        (
            replace(BUDGET, micro_batch_multiple=10**9),
            "make 8000000000 micro-batches of dispatch_batch_size 64, .* at most 65536; lower them",
        ),
        (
            replace(GOOD, min_micro_batches=10**9, by_groups=True),
            "make 8000000000 micro-batches of dispatch_batch_size 64",
        ),
    ],
)
def test_a_contradiction_names_its_remedy(config: PlanConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_config(config)


@pytest.mark.parametrize("multiple", [2.25, 3])
def test_a_bound_on_skips_that_the_window_cannot_keep_is_refused(multiple: float) -> None:
    with pytest.raises(ConfigError, match=r"max_skips is 1, but .* raise it to 2 or more"):
        validate_config(replace(GOOD, max_skips=1), multiple)
    with pytest.raises(ConfigError, match="outlier_max_skips is 0"):
        validate_config(replace(GOOD, outlier_max_skips=0), multiple)


@pytest.mark.parametrize("multiple", [0.5, float("nan"), float("inf")])
def test_a_window_is_at_least_one_dispatch_batch(multiple: float) -> None:
    with pytest.raises(ConfigError, match="window_multiple is"):
        validate_config(GOOD, multiple)
