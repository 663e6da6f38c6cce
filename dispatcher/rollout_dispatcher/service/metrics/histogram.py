"""A histogram that takes a step's samples at once.

prometheus-client's own Histogram observes one value a call, about a microsecond each; a step has
thousands of samples, and the event loop would feel that. This one counts an array in one pass and
is otherwise the same: cumulative buckets, a sum and a count.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from rollout_dispatcher.plan import FloatArray, IntArray


class ArrayHistogram:
    """Upper bounds are inclusive, as in Prometheus; the last bucket, +Inf, is implied."""

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
        bounds = [*self._bounds.tolist(), float("inf")]
        labels = [str(floatToGoString(bound)) for bound in bounds]  # type: ignore[no-untyped-call]
        cumulative = np.cumsum(self._counts).tolist()
        yield HistogramMetricFamily(
            self._name, self._text, list(zip(labels, cumulative, strict=True)), self._sum
        )

    def describe(self) -> Iterator[Metric]:
        """The same family, for the registry's check of names."""
        return self.collect()
