"""What panels have in common: where they ask, how values are shown, and what to do about them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
)

#: Which Prometheus is chosen above the panels.
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
#: Which dispatcher is.
CHOSEN = 'job="$job",instance="$instance"'
#: Grafana sees to it that this holds at least four scrapes.
WINDOW = "$__rate_interval"
#: For what is told once a step, which may take many minutes: chosen above the panels. Over a range
#: without a step there is no mean, and in one that is shorter a step is more than all of the time.
OF_STEPS = "$over"


#: The ledger of the ranks' time.
TIME = "dispatcher_rank_time_seconds_total"


class Unit(StrEnum):
    """How Grafana writes a value."""

    COUNT = "short"
    SHARE = "percentunit"
    RATIO = "none"
    SECONDS = "s"
    BYTES = "bytes"
    BYTES_PER_SECOND = "Bps"
    PER_SECOND = "cps"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    queries: by legend, in which labels stand as {{label}}. what: what it shows, and what to do.
    steps: from which value on it is drawn in a colour, in ascending order; green below.
    words: of a single value, what some values are called. single: the last value, in large.
    """

    title: str
    what: str
    queries: Mapping[str, str]
    unit: Unit = Unit.COUNT
    steps: Sequence[tuple[float, str]] = ()
    words: Mapping[int, tuple[str, str]] | None = None
    single: bool = False
    width: int = 8
    height: int = 8
    highest: float | None = None


def chosen(metric: str, **labels: str) -> str:
    """A selector of one metric of the chosen dispatcher; `=~` where a value has a bar."""
    more = (f'{name}{"=~" if "|" in value else "="}"{value}"' for name, value in labels.items())
    return f"{metric}{{{','.join([CHOSEN, *more])}}}"


def rate(metric: str, **labels: str) -> str:
    """How fast a counter grows, each second."""
    return f"rate({chosen(metric, **labels)}[{WINDOW}])"


def of_steps(metric: str, **labels: str) -> str:
    """The same of a counter that grows once a step."""
    return f"rate({chosen(metric, **labels)}[{OF_STEPS}])"


def mean(histogram: str, **labels: str) -> str:
    """The mean of what a histogram has seen of steps lately."""
    return f"{of_steps(histogram + '_sum', **labels)} / {of_steps(histogram + '_count', **labels)}"


def quantile(level: float, histogram: str, *by: str, within: str = OF_STEPS) -> str:
    """A quantile of what a histogram has seen lately, by labels."""
    kept, buckets = ", ".join(["le", *by]), chosen(f"{histogram}_bucket")
    return f"histogram_quantile({level:g}, sum by ({kept}) (rate({buckets}[{within}])))"


def share_of_time(cause: str) -> str:
    """The share of the ranks' time that went to these causes."""
    spent = of_steps(TIME, cause=cause)
    return f"sum({spent}) / sum({of_steps(TIME)})"


def lost_by_plan(split: str) -> str:
    """The share of the ranks' time that such a split of the samples loses, by its cost."""
    cost = "dispatcher_planned_cost_total"
    return f"1 - sum({of_steps(cost, split='even')}) / sum({of_steps(cost, split=split)})"


def build(panel: Panel, number: int) -> "stat.Panel | timeseries.Panel":
    """The builder of a panel, with this id."""
    built = _single(panel) if panel.single else _over_time(panel)
    built = (
        built.id(number)
        .title(panel.title)
        .description(panel.what)
        .datasource(SOURCE)
        .span(panel.width)
        .height(panel.height)
        .unit(panel.unit)
        .min(0)
        .thresholds(_thresholds(panel.steps))
    )
    if panel.highest is not None:
        built = built.max(panel.highest)
    for at, (legend, expression) in enumerate(panel.queries.items()):
        built = built.with_target(_query(legend, expression, chr(ord("A") + at), panel.single))
    return built


def _single(panel: Panel) -> stat.Panel:
    last = common.ReduceDataOptions().calcs(["lastNotNull"])
    built = stat.Panel().reduce_options(last).no_value("unknown")
    built = built.graph_mode(common_models.BigValueGraphMode.NONE)
    if panel.words is not None:
        options = {
            str(value): ValueMappingResult(text=text, color=color)
            for value, (text, color) in panel.words.items()
        }
        built = built.mappings([ValueMap(options=options)])
    return built


def _over_time(panel: Panel) -> timeseries.Panel:
    legend = (
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .calcs([])
    )
    tooltip = (
        common.VizTooltipOptions()
        .mode(common_models.TooltipDisplayMode.MULTI)
        .sort(common_models.SortOrder.DESCENDING)
    )
    built = timeseries.Panel().legend(legend).tooltip(tooltip).fill_opacity(8).line_width(1)
    if panel.steps:
        dashed = common_models.GraphThresholdsStyleMode.DASHED
        built = built.thresholds_style(common.GraphThresholdsStyleConfig().mode(dashed))
    return built


def _thresholds(steps: Sequence[tuple[float, str]]) -> dashboard.ThresholdsConfig:
    colours = [Threshold(value=None, color="green")]
    colours += [Threshold(value=value, color=colour) for value, colour in steps]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(colours)


def _query(legend: str, expression: str, ref_id: str, single: bool) -> prometheus.Dataquery:
    asked = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(ref_id)
    asked = asked.datasource(SOURCE)
    return asked.instant() if single else asked.range()
