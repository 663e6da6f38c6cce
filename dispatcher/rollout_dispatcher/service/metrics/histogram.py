"""Histograms of what there is much of: a step's samples, and messages.

prometheus-client's own observes one value a call, some microseconds each: it looks at every bucket,
under a lock. There are thousands of samples a step, and the event loop would feel that. These count
an array in one pass, or a value by one bisection, in one thread; they are otherwise the same:
cumulative buckets, a sum and a count, upper bounds inclusive, with a last bucket, +Inf, implied.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from rollout_planner.types import FloatArray, IntArray


class ArrayHistogram:
    """Counts whole arrays."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._text = name, text
        self._bounds = np.asarray(bounds, np.float64)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0
        registry.register(self)

    def observe_all(self, values: Sequence[float] | FloatArray | IntArray) -> None:
        """Count every value."""
        array = np.asarray(values, np.float64)
        places = np.searchsorted(self._bounds, array, side="left")
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += float(array.sum())

    def collect(self) -> Iterator[Metric]:
        """The histogram as one metric family."""
        buckets = _buckets(self._bounds.tolist(), self._counts.tolist())
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum)

    def describe(self) -> Iterator[Metric]:
        """The same family, for the registry's check of names."""
        return self.collect()


class ValueHistogram:
    """Counts values one at a time, each with the value of the label if there is a label.

    label: its name, and the values whose series are there from the start.
    """

    def __init__(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        registry: CollectorRegistry,
        label: tuple[str, Iterable[str]] | None = None,
    ) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._label = None if label is None else label[0]
        known: Iterable[str] = [""] if label is None else label[1]
        self._counts: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(bounds) + 1))
        self._sums = defaultdict(float, dict.fromkeys(known, 0.0))
        registry.register(self)

    def observe(self, value: float, label: str = "") -> None:
        """Count a value."""
        self._counts[label][bisect_left(self._bounds, value)] += 1
        self._sums[label] += value

    def collect(self) -> Iterator[Metric]:
        """The histogram as one metric family."""
        labels = [] if self._label is None else [self._label]
        family = HistogramMetricFamily(self._name, self._text, labels=labels)
        for label, total in self._sums.items():
            buckets = _buckets(self._bounds, self._counts[label])
            family.add_metric([label] if labels else [], buckets, total)
        yield family

    def describe(self) -> Iterator[Metric]:
        """The same family, for the registry's check of names."""
        return self.collect()


def _buckets(bounds: Iterable[float], counts: Iterable[int]) -> list[tuple[str, int]]:
    """Cumulative, by upper bounds as Prometheus writes them."""
    edges = [str(floatToGoString(bound)) for bound in (*bounds, float("inf"))]  # type: ignore[no-untyped-call]
    return list(zip(edges, accumulate(counts), strict=True))
