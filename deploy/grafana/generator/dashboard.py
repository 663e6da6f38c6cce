"""The dashboard: rows of panels, and which dispatcher of which Prometheus they show."""

import json

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    Dashboard,
    DashboardCursorSync,
    DashboardLinkType,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from deploy.grafana.generator import marks
from deploy.grafana.generator.panels import SOURCE, build
from deploy.grafana.generator.rows import balance, buffer, flow, freshness, health, itself, ranks

ROWS = {
    "Health": health.PANELS,
    "Ranks: where their time goes": ranks.PANELS,
    "Balance: plain split, planned, best": balance.PANELS,
    "Flow": flow.PANELS,
    "Buffer": buffer.PANELS,
    "Freshness": freshness.PANELS,
    "The dispatcher itself": itself.PANELS,
}
DOCUMENTS = {
    "Runbook": "docs/runbook.md",
    "Measured time": "docs/metrics.md#when-times-are-missing",
    "Troubleshooting": "docs/guide.md#what-goes-wrong",
}
#: A step takes seconds in one run and half an hour in another.
RANGES, USUAL_RANGE = ("1m", "5m", "15m", "1h", "6h"), "15m"


def as_json() -> str:
    """The dashboard as Grafana is given it."""
    return json.dumps(make(), cls=JSONEncoder, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def make() -> Dashboard:
    """The dashboard; rows count as panels in its ids."""
    made = (
        builders.Dashboard("rollout-dispatcher")
        .uid("rollout-dispatcher")
        .description("What buffering, selecting and balancing samples does, and what is lost.")
        .tags(["rollout-dispatcher", "training"])
        .editable()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("15s")
        .timezone("browser")
        .with_variable(
            builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
        .with_variable(_label_variable("job", "dispatcher_dp_size"))
        .with_variable(_label_variable("instance", 'dispatcher_dp_size{job="$job"}'))
    )
    for title, path in DOCUMENTS.items():
        link = builders.DashboardLink(title).type(DashboardLinkType.LINK).url("$docs/" + path)
        made = made.link(link.icon("doc").target_blank(True).tags([]))
    made = made.with_variable(_range_variable()).with_variable(_documents_variable())
    number = 0
    for title, panels in ROWS.items():
        number += 1
        made = made.with_row(builders.Row(title).id(number))
        for panel in panels:
            number += 1
            made = made.with_panel(build(panel, number))
    dashboard = made.build()
    dashboard.annotations = marks.build()
    return dashboard


def _label_variable(label: str, of: str) -> builders.QueryVariable:
    return (
        builders.QueryVariable(label)
        .label(label)
        .datasource(SOURCE)
        .query(f"label_values({of}, {label})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
    )


def _range_variable() -> builders.IntervalVariable:
    """Over how long means of steps are taken: longer than a step."""
    options = [
        VariableOption(selected=length == USUAL_RANGE, text=length, value=length)
        for length in RANGES
    ]
    (usual,) = (option for option in options if option.selected)
    made = builders.IntervalVariable("over").label("means of steps over")
    return made.values(",".join(RANGES)).options(options).current(usual)


def _documents_variable() -> builders.TextBoxVariable:
    """Where this project's documents are to be read; links begin with it."""
    return builders.TextBoxVariable("docs").label("documents").default_value(".")
