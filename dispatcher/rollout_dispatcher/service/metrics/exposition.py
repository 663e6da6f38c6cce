"""Metric families as text, as Prometheus reads them.

The same lines as prometheus-client's, in a tenth of the time, which counts where ranks are
hundreds: no name or label of ours needs escaping but in label values, and families of one series a
DP rank are kept as the values that they are, until they are written. Numbers are written as Python
writes them, which Go reads as well.

Histograms of what there is much of: a step's samples, and messages.

prometheus-client's own observes one value a call, some microseconds each: it looks at every bucket,
under a lock. There are thousands of samples a step, and the event loop would feel that. These count
an array in one pass, or a value by one bisection, in one thread; they are otherwise the same:
cumulative buckets, a sum and a count, upper bounds inclusive, with a last bucket, +Inf, implied.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import add

import numpy as np
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from rollout_planner.types import FloatArray, IntArray

#: Of the text format, as Prometheus is told it.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class RankFamily(Metric):
    """A counter or gauge with one series a DP rank, and for each value of other labels."""

    def __init__(
        self, name: str, text: str, kind: str, values: Mapping[int, float] | None = None
    ) -> None:
        self._parts: list[tuple[dict[str, str], Mapping[int, float]]] = []
        super().__init__(name, text, kind)
        if values is not None:
            self.add(values)

    def add(self, values: Mapping[int, float], **labels: str) -> None:
        """Values by DP rank, which are a snapshot, and the labels that they have beside it."""
        self._parts.append((labels, values))

    @property
    def series(self) -> str:
        """What each of its series is called."""
        return f"{self.name}_total" if self.type == "counter" else self.name

    @property
    def samples(self) -> list[Sample]:
        """As prometheus-client has them, for who asks for a single one."""
        return [
            Sample(self.series, {**labels, "dp_rank": str(dp_rank)}, value)
            for labels, values in self._parts
            for dp_rank, value in values.items()
        ]

    @samples.setter
    def samples(self, _: list[Sample]) -> None:
        """The base class begins with none."""

    def lines(self) -> Iterator[str]:
        """The lines of all series."""
        for labels, values in self._parts:
            others = "".join(f'{name}="{_escaped(value)}",' for name, value in labels.items())
            before = f'{self.series}{{{others}dp_rank="'
            for dp_rank, value in values.items():
                yield f'{before}{dp_rank}"}} {_number(value)}\n'


def render(families: Iterable[Metric]) -> bytes:
    """The whole exposition."""
    lines: list[str] = []
    for family in families:
        lines += _head(family)
        lines += family.lines() if isinstance(family, RankFamily) else _lines(family)
    return "".join(lines).encode()


def _head(family: Metric) -> tuple[str, str]:
    name, kind, text = family.name, family.type, family.documentation
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    if kind == "counter":
        name += "_total"
    elif kind == "info":
        name, kind = f"{name}_info", "gauge"
    return f"# HELP {name} {text}\n", f"# TYPE {name} {kind}\n"


def _lines(family: Metric) -> Iterator[str]:
    for sample in family.samples:
        if sample.name.endswith("_created"):  # of no use here, and a family more in the text format
            continue
        labels = ",".join(
            f'{name}="{_escaped(value)}"' for name, value in sorted(sample.labels.items())
        )
        braced = f"{{{labels}}}" if labels else ""
        yield f"{sample.name}{braced} {_number(sample.value)}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    text = repr(float(value))
    return _NOT_FINITE.get(text, text)


_NOT_FINITE = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}


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
