"""Histograms of values that come in large numbers: a step's samples, and messages.

prometheus-client observes one value a call, which takes microseconds under a lock, and a step has
thousands of samples. These count an array in one pass, in one thread. Their buckets are the same:
cumulative, upper bounds inclusive, the last one +Inf.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import add

import numpy as np
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from rollout_planner.types import FloatArray, IntArray


class Histogram:
    """Counts values, each with the value of the label if there is a label.

    label: its name; known: its values whose series are there from the start.
    """

    def __init__(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        label: str = "",
        known: Iterable[str] = ("",),
    ) -> None:
        self._name, self._text, self._bounds, self._label = name, text, bounds, label
        self._counts: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(bounds) + 1))
        self._sums = defaultdict(float, dict.fromkeys(known, 0.0))

    def observe(self, value: float, label: str = "") -> None:
        """Count a value."""
        self._counts[label][bisect_left(self._bounds, value)] += 1
        self._sums[label] += value

    def observe_all(self, values: Sequence[float] | FloatArray | IntArray) -> None:
        """Count every value, in one pass."""
        array, counts = np.asarray(values, np.float64), self._counts[""]
        places = np.searchsorted(np.asarray(self._bounds, np.float64), array, side="left")
        found = np.bincount(places, minlength=len(counts)).tolist()
        self._counts[""] = list(map(add, counts, found))
        self._sums[""] += float(array.sum())

    def family(self) -> Metric:
        """The histogram as one metric family."""
        labels = [self._label] if self._label else []
        family = HistogramMetricFamily(self._name, self._text, labels=labels)
        for label, total in self._sums.items():
            buckets = _buckets(self._bounds, self._counts[label])
            family.add_metric([label] if labels else [], buckets, total)
        return family


def _buckets(bounds: Iterable[float], counts: Iterable[int]) -> list[tuple[str, int]]:
    """Cumulative, by upper bounds as Prometheus writes them."""
    edges = [str(floatToGoString(bound)) for bound in (*bounds, float("inf"))]  # type: ignore[no-untyped-call]
    return list(zip(edges, accumulate(counts), strict=True))
