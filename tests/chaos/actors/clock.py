"""A clock for a dispatcher process that jumps when it is told to.

The process is told by a file with the seconds to jump, and SIGUSR1; it removes the file once its
clock has jumped. Production code has no switch: `planted` puts the clock in before `serve` begins.
"""

import signal
from collections.abc import Callable
from pathlib import Path

from rollout_dispatcher.core.config import SteadyClock
from rollout_dispatcher.service import dispatcher

JUMP = signal.SIGUSR1


def follow_jumps(told: Path) -> None:
    """Have the dispatcher of this process read a clock that jumps."""
    offset = 0.0

    def jump(*_: object) -> None:
        nonlocal offset
        offset += float(told.read_text())
        told.unlink()

    def jumping(source: Callable[[], float]) -> SteadyClock:
        return SteadyClock(lambda: source() + offset)

    assert vars(dispatcher)["SteadyClock"] is SteadyClock, "another clock: plant elsewhere"
    vars(dispatcher)["SteadyClock"] = jumping
    signal.signal(JUMP, jump)
