"""What the dashboard marks on every panel: changes after which curves are not what they were."""

from dataclasses import dataclass

from grafana_foundation_sdk.models.dashboard import AnnotationContainer, AnnotationQuery

from deploy.grafana.generator.panels import SOURCE, WINDOW, chosen


@dataclass(frozen=True, slots=True)
class Mark:
    """One kind of mark.

    text: shown at a mark, in which labels stand as {{label}}. in_value: the series has the time of
    the mark, in milliseconds; otherwise there is a mark while the series is above 0.
    """

    name: str
    text: str
    query: str
    colour: str
    in_value: bool = False


RELOADS = chosen("dispatcher_config_reloads_total", outcome="changed|refused")
MARKS = [
    Mark(
        "Restarts",
        "the dispatcher started",
        f"{chosen('process_start_time_seconds')} * 1000",
        "red",
        in_value=True,
    ),
    Mark(
        "Generations",
        "a process group of ranks joined",
        f"changes({chosen('dispatcher_generation')}[{WINDOW}]) > 0",
        "blue",
    ),
    Mark("Settings", "settings {{outcome}}", f"increase({RELOADS}[{WINDOW}]) > 0", "purple"),
]


class _OfPrometheus(AnnotationQuery):
    """The SDK knows what the marks of all sources have, and not what Prometheus' have beside it."""

    def __init__(self, mark: Mark) -> None:
        super().__init__(mark.name, SOURCE, icon_color=mark.colour, expr=mark.query)
        self._mark = mark

    def to_json(self) -> dict[str, object]:
        more = {"titleFormat": self._mark.text, "useValueForTime": self._mark.in_value}
        return super().to_json() | more


def build() -> AnnotationContainer:
    """All marks, as Grafana's Prometheus source reads them."""
    return AnnotationContainer([_OfPrometheus(mark) for mark in MARKS])
