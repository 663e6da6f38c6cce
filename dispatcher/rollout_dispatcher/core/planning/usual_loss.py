"""How many loss tokens a sample has, as samples arrive: what steps are to be like.

A window knows it worse, as the longest samples are held back in it. Counted are those that no plan
has passed over yet, once each; older steps count less and less.
"""

from dataclasses import replace

import numpy as np

from rollout_planner.types import FloatArray, Window

#: What a step's arrivals count for a step later: half after 34.
KEPT = 0.98


class UsualLoss:
    """Follows plans."""

    def __init__(self) -> None:
        self._sums = np.zeros(3)

    def planned(self, window: Window) -> None:
        """A step was planned from this window."""
        self._sums = KEPT * (self._sums + _sums(window))

    def with_(self, window: Window) -> tuple[float, float]:
        """Mean and standard deviation, of this window's arrivals too.

        Of all that the window has where no arrival is known, as after a restart.
        """
        sums = self._sums + _sums(window)
        if not sums[0]:
            sums = _sums(replace(window, skips=np.zeros_like(window.skips)))
        count, total, squares = sums.tolist()
        mean = total / count
        return mean, max(squares / count - mean * mean, 0.0) ** 0.5


def _sums(window: Window) -> FloatArray:
    """Count, sum and sum of squares of arrivals."""
    tokens = window.loss_tokens
    assert tokens is not None
    new = tokens[window.skips == 0].astype(np.float64)
    return np.array([len(new), new.sum(), new @ new])
