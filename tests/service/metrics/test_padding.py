"""`dispatcher_padding_tokens_total`: what ranks compute for layout's sake."""

from typing import Any

import numpy as np
import pytest

from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import StepPlanned
from rollout_dispatcher.core.planning.trigger import Trigger
from rollout_dispatcher.service.config.serve import ServeConfig, core_config
from rollout_dispatcher.service.metrics.registry import Metrics
from rollout_planner.planner import plan
from rollout_planner.types import Window

#: Of four samples; two ranks.
TOKENS = np.array([10, 7, 5, 3])
BY_SIZE = {"micro_batch_size": 2, "micro_batch_tokens": None}


def padding(packed_lengths: dict[int, int], **changes: Any) -> float:
    """What is counted for one step of these samples."""
    asked = {"dp_size": 2, "global_batch_size": 4, "micro_batch_tokens": 16, "cost": "tokens"}
    config = ServeConfig.model_validate(asked | changes)
    metrics = Metrics(config, DispatcherCore(core_config(config), "run"), lambda: 0.0)
    metrics.packed_lengths |= packed_lengths
    n = len(TOKENS)
    nothing = np.zeros(n, np.int64)
    found = plan(Window(TOKENS, nothing, nothing - 1, nothing > 0), config.plan_config())
    step = StepPlanned(
        0, found, Trigger.WINDOW_FULL, np.zeros(n), nothing, (), TOKENS[found.chosen], 0, ()
    )
    metrics.step_planned(step)
    counted = metrics.registry.get_sample_value("dispatcher_padding_tokens_total")
    assert counted is not None
    return counted


@pytest.mark.parametrize(
    ("changes", "packed_lengths", "expected"),
    [
        ({}, {}, 0),
        ({"sample_length_multiple": 4}, {}, 2 + 1 + 3 + 1),
        ({}, {0: 16, 1: 16}, 2 * 16 - 25),
        ({"sample_length_multiple": 4}, {0: 20, 1: 20}, 2 * 20 - 25),
        ({"layout": "padded"} | BY_SIZE, {}, (10 - 7) + (5 - 3)),
        ({"layout": "padded", "sample_length_multiple": 8} | BY_SIZE, {}, 2 * (16 + 8) - 25),
        ({"micro_batch_multiple": 2}, {}, 0),
        ({"micro_batch_multiple": 4}, {}, 4),
        ({"min_micro_batches": 4, "sample_length_multiple": 4}, {}, 7 + 4 * 4),
        ({"micro_batch_multiple": 2}, {0: 16, 1: 16}, 4 * 16 - 25),
        ({"micro_batch_tokens": 8, "max_split": 2}, {}, 12 + 7 + (5 + 3) - 25),
    ],
)
def test_padding_and_fillers_are_counted(
    changes: dict[str, Any], packed_lengths: dict[int, int], expected: int
) -> None:
    assert padding(packed_lengths, **changes) == expected
