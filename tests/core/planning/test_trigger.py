"""When a wanted step is planned."""

import math

import pytest

from rollout_dispatcher.core.planning.trigger import (
    Go,
    MakeCapacity,
    Trigger,
    TriggerConfig,
    TriggerInputs,
    Wait,
    decide,
)

CONFIG = TriggerConfig(batch=64, window=96, max_wait=2.0)


def situation(
    ready: int,
    *,
    full: bool = False,
    growing: bool = False,
    flush: bool = False,
    hungry_for: float | None = None,
    tried: int | None = None,
    stuck: bool = False,
    quiet_for: float = 0.0,
    helped_for: float = math.inf,
) -> TriggerInputs:
    return TriggerInputs(
        ready, full, growing, flush, hungry_for, tried, stuck, quiet_for, helped_for
    )


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (situation(96), Go(Trigger.WINDOW_FULL)),
        (situation(64, full=True), Go(Trigger.BUFFER_FULL)),
        (situation(64, full=True, growing=True, tried=64), Wait()),
        (situation(64, full=True, growing=True, hungry_for=0.0), Go(Trigger.BUFFER_FULL)),
        (situation(64, flush=True), Go(Trigger.FLUSH)),
        (situation(64), Go(Trigger.TARGET_EXCESS, trial=True)),
        (situation(67, tried=64), Wait()),
        (situation(68, tried=64), Go(Trigger.TARGET_EXCESS, trial=True)),
        (situation(64, tried=64, hungry_for=0.5), Wait(1.5)),
        (situation(64, tried=64, hungry_for=2.0), Go(Trigger.MAX_WAIT)),
        (situation(63), Wait()),
        (situation(63, hungry_for=99.0), Wait()),
        (situation(63, flush=True), Go(Trigger.FLUSH)),
        (situation(63, full=True, hungry_for=99.0), Wait()),  # a soft cap: more can come
        (situation(63, full=True, stuck=True), Wait()),  # nobody is hungry
        (situation(63, full=True, stuck=True, growing=True, hungry_for=0.5), Wait(1.5)),
        (
            situation(63, full=True, stuck=True, growing=True, hungry_for=2.0),
            Go(Trigger.BUFFER_FULL),
        ),
        (situation(63, full=True, stuck=True, hungry_for=9.0, helped_for=1.5), Wait(0.5)),
        (situation(0, full=True, stuck=True, growing=True, hungry_for=9, quiet_for=1.5), Wait(0.5)),
        (
            situation(0, full=True, stuck=True, growing=True, hungry_for=9, quiet_for=2),
            MakeCapacity(),
        ),
        (situation(0, full=True, stuck=True, hungry_for=9, quiet_for=2), Wait()),
        (situation(0, flush=True, full=True), Wait()),
    ],
)
def test_decisions(at: TriggerInputs, expected: Go | Wait | MakeCapacity) -> None:
    assert decide(CONFIG, at) == expected
