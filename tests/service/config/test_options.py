"""`ServeConfig`: what is accepted, what is derived, and what contradicts itself."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.service.config.serve import ServeConfig, core_config
from rollout_dispatcher.service.config.values import DURATION, SIZE
from rollout_dispatcher.service.process import machine_memory
from rollout_planner.types import Grouping, Layout, Strategy


def config(**changes: Any) -> ServeConfig:
    return ServeConfig.model_validate(
        {"dp_size": 2, "global_batch_size": 8, "micro_batch_size": 2} | changes
    )


def test_every_option_has_a_line_of_help() -> None:
    lacking = [name for name, field in ServeConfig.model_fields.items() if not field.description]
    assert lacking == []


def test_every_heading_stands_at_an_option() -> None:
    assert ServeConfig.HEADINGS.keys() <= ServeConfig.model_fields.keys()


def test_the_core_is_told_each_option() -> None:
    given = {
        "group_timeout": 101.0, "producer_timeout": 102.0, "rank_timeout": 103.0,
        "max_staleness": 104, "steps_per_version": 105, "max_open_steps": 106,
        "producer_credits": 107,
    }  # fmt: skip
    core = core_config(config(**given, max_imbalance=0.108))
    assert {name: getattr(core, name) for name in given} == given
    assert core.target_excess == 0.108


def test_the_window_is_counted_in_decimal_not_in_binary() -> None:
    assert 1.15 * 100 < 115
    assert config(global_batch_size=100, window=1.15).window_samples == 115


def test_frames_may_have_a_share_of_the_memory_there_is_and_one_always_finds_room() -> None:
    assert config(receive_bytes="1MiB").received_bytes == 2**20
    assert config(max_frame_bytes="1B").received_bytes == machine_memory() // 16
    assert config(max_frame_bytes="1TiB").received_bytes == 2**40


@pytest.mark.parametrize("multiple", [1, 1.25, 1.5, 2, 8, 64])
def test_the_default_bound_on_skips_can_always_be_kept(multiple: float) -> None:
    """A sample that is overtaken by a whole window per dispatch is due after ceil(W) - 1."""
    assert config(window=multiple).skips_bound >= multiple - 1


def test_the_planner_is_told_what_was_configured() -> None:
    asked = {"layout": "padded", "strategy": "kk", "cost": "tokens", "groups": "micro-batch"}
    plan = config(**asked, group_size=2).plan_config()
    assert (plan.dp_size, plan.dispatch_batch_size, plan.micro_batch_size) == (2, 8, 2)
    assert (plan.layout, plan.strategy) == (Layout.PADDED, Strategy.KK)
    assert plan.grouping is Grouping.MICRO_BATCH


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"buffer_capacity": 11}, "raise it to 12"),
        ({"group_size": 13}, "set --global-batch-size 13"),
        ({"group_size": 3}, "set --global-batch-size 6 or 9"),
        ({"cost": "cubic:1"}, "quadratic"),
        ({"rank_timeout": 10.0}, "lower --set heartbeat-interval"),
        ({"idle_timeout": 9.0}, "lower --set heartbeat-interval"),
        ({"micro_batch_tokens": 1024}, "exactly one of --micro-batch-size"),
        ({"micro_batch_size": None}, "exactly one of --micro-batch-size"),
        ({"max_delay": 2, "window": 5}, "raise it to 4"),
        ({"global_batch_size": 9}, "use 8 or 12"),
        ({"sample_retention": "checkpoint"}, "set --journal-dir"),
        ({"payload_stores": ("file:///a",)}, "set --journal-dir, or leave --payload-stores out"),
        (
            {"payload_stores": ("file:///a",) * 2, "journal_dir": "/tmp/j"},
            "--payload-stores names file:///a twice; name it once",
        ),
        (
            {"payload_stores": ("fiel:///a",), "journal_dir": "/tmp/j"},
            "what fiel is: did you mean file?",
        ),
        (
            {"payload_stores": ("rya://a/b",), "journal_dir": "/tmp/j"},
            "no client would know what rya is: did you mean ray?",
        ),
        (
            {"payload_stores": ("moncake://a:1",), "journal_dir": "/tmp/j"},
            "what moncake is: did you mean mooncake?",
        ),
        ({"groups": "micro-batch", "group_size": 4}, "raise it to 4 or more"),
    ],
)
def test_a_contradiction_names_its_remedy(changes: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"dp_size": 0},
        {"window": 0.99},
        {"window": float("nan")},
        {"max_wait": 0.0},
        {"max_wait": "two seconds"},
        {"buffer_bytes": "64 parsecs"},
        {"buffer_bytes": "0.5B"},
        {"listen": []},
        {"listen": ["7077"]},
        {"payload_stores": ["/mnt/rollouts"]},
        {"payload_stores": ["file://mnt/rollouts"]},
        {"payload_stores": ["file:///"]},
        {"payload_stores": ["none"]},
        {"payload_stores": [f"file:///{at}" for at in range(17)]},
        {"inline_limit": "1"},
        {"prefetch_bytes": "0B"},
        {"max_delay": -1},
        {"layout": "stacked"},
        {"windw_multiple": 2},
    ],
)
def test_a_value_out_of_range_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        config(**changes)


@pytest.mark.parametrize(
    "stores",
    ["file:///a, mooncake:host:7", ["file:///a,mooncake:host:7"], ["file:///a", "mooncake:host:7"]],
)
def test_payload_stores_are_given_in_any_way(stores: object) -> None:
    read = config(payload_stores=stores, journal_dir="/tmp/j", inline_limit="0B")
    assert read.payload_stores == ("file:///a", "mooncake:host:7")
    assert read.inline_limit == 0
    assert read.referenced_capacity == 16 * read.buffer_memory


@pytest.mark.parametrize("address", ["s3://rollouts", "nfs://host/a", "ray://run/payloads"])
def test_a_scheme_that_is_no_misspelt_one_of_ours_is_somebody_elses(address: str) -> None:
    assert config(payload_stores=[address], journal_dir="/tmp/j").payload_stores == (address,)


@given(st.floats(min_value=1e-6, max_value=1e9))
def test_a_duration_is_read_back_as_it_was_written(seconds: float) -> None:
    assert DURATION.parse(DURATION.format(seconds)) == seconds


@given(st.integers(min_value=1, max_value=2**60))
def test_a_size_is_read_back_as_it_was_written(size: int) -> None:
    assert SIZE.parse(SIZE.format(size)) == size


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.1, "100ms"), (2.0, "2s"), (90.0, "90s"), (600.0, "10m"), (86400, "1d")]
)
def test_durations_are_written_for_people(seconds: float, text: str) -> None:
    assert DURATION.format(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(2**28, "256MiB"), (2**32, "4GiB"), (5 * 10**9, "5GB"), (1000, "1kB")]
)
def test_sizes_are_written_for_people(size: int, text: str) -> None:
    assert SIZE.format(size) == text


def test_planning_may_compare_nothing_and_nothing_else_takes_no_time() -> None:
    assert config(planning_budget="0s").plan_config().planning_budget == 0
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        config(planning_budget=-0.001)
    with pytest.raises(ValidationError, match="greater than 0"):
        config(max_wait="0s")
