"""Ranks that would not pad as their samples were planned for are told what to change."""

from typing import Any

import pytest

from rollout_dispatcher.errors import ConfigError, RankRefused
from rollout_dispatcher.service.config.checks import check_padding, check_rank
from rollout_dispatcher.service.config.serve import ServeConfig, core_config


def config(**changes: Any) -> ServeConfig:
    asked = {"dp_size": 2, "global_batch_size": 8, "micro_batch_tokens": 100} | changes
    return ServeConfig.model_validate(asked)


@pytest.mark.parametrize(
    ("changes", "least", "why"),
    [
        ({}, 100, "--micro-batch-tokens 100"),
        ({"sample_length_multiple": 16}, 100, "--micro-batch-tokens 100"),
        ({"on_oversize": "drop"}, 100, "--micro-batch-tokens 100"),
        (
            {"on_oversize": "alone", "max_sample_tokens": 130, "sample_length_multiple": 16},
            144,
            "--on-oversize alone and --set max-sample-tokens=130",
        ),
        ({"on_oversize": "alone", "max_sample_tokens": 90}, 100, "--micro-batch-tokens 100"),
        (
            {"micro_batch_tokens": None, "micro_batch_size": 2, "max_sample_tokens": 50},
            100,
            "--micro-batch-size 2 and --set max-sample-tokens=50",
        ),
    ],
)
def test_a_packed_length_has_room_for_every_micro_batch_there_can_be(
    changes: dict[str, Any], least: int, why: str
) -> None:
    check_padding(config(**changes), least)
    check_padding(config(**changes), None)
    with pytest.raises(RankRefused) as caught:
        check_padding(config(**changes), least - 1)
    said = str(caught.value)
    assert f"packed_length={least - 1} tokens, and may have {least} ({why})" in said
    assert f"packed_length={least} or more" in said


def test_samples_that_fit_no_micro_batch_once_padded_are_refused_or_dropped() -> None:
    assert core_config(config(sample_length_multiple=16)).limits.max_sample_tokens == 96
    dropping = core_config(config(sample_length_multiple=16, on_oversize="drop"))
    assert dropping.drop_above == 96
    with pytest.raises(ConfigError, match="multiple of 128 tokens, so none would fit"):
        config(sample_length_multiple=128)


def test_a_rank_that_takes_part_in_no_block_is_refused() -> None:
    with pytest.raises(RankRefused, match="in up to 1; make the stream with max_split=2, for a"):
        check_rank(config(max_split=2), opens_stores=False)
    check_rank(config(max_split=2), opens_stores=False, max_split=2)
