"""When a wanted step is planned."""

import pytest

from dispatcher.core.events import Trigger
from dispatcher.core.trigger import Go, Standing, TriggerConfig, Wait, decide

CONFIG = TriggerConfig(batch=64, window=96, max_wait=2.0)


def standing(
    ready: int,
    *,
    full: bool = False,
    growing: bool = False,
    flush: bool = False,
    hungry_for: float | None = None,
    tried: int | None = None,
) -> Standing:
    return Standing(ready, full, growing, flush, hungry_for, tried)


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (standing(96), Go(Trigger.WINDOW_FULL)),
        (standing(64, full=True), Go(Trigger.BUFFER_FULL)),
        (standing(64, full=True, growing=True, tried=64), Wait()),
        (standing(64, full=True, growing=True, hungry_for=0.0), Go(Trigger.BUFFER_FULL)),
        (standing(64, flush=True), Go(Trigger.FLUSH)),
        (standing(64), Go(Trigger.TARGET_EXCESS, trial=True)),
        (standing(67, tried=64), Wait()),
        (standing(68, tried=64), Go(Trigger.TARGET_EXCESS, trial=True)),
        (standing(64, tried=64, hungry_for=0.5), Wait(1.5)),
        (standing(64, tried=64, hungry_for=2.0), Go(Trigger.MAX_WAIT)),
        (standing(63), Wait()),
        (standing(63, hungry_for=99.0), Wait()),
        (standing(63, flush=True), Go(Trigger.FLUSH)),
        (standing(63, full=True), Go(Trigger.BUFFER_FULL)),
        (standing(63, full=True, growing=True, hungry_for=99.0), Wait()),
        (standing(0, flush=True, full=True), Wait()),
    ],
)
def test_decisions(at: Standing, expected: Go | Wait) -> None:
    assert decide(CONFIG, at) == expected
