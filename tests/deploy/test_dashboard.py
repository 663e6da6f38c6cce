"""The dashboard's JSON: as its generator makes it, in order, and about metrics that are there.

No Grafana reads it here. `tests/e2e/test_dashboard.py` has a real Prometheus answer its queries.
"""

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest

from tests.support.options import FLAGS, named
from tests.support.source import ROOT
from tests.test_docs import leads

PATH = ROOT / "deploy/grafana/dashboards/rollout-dispatcher.json"
DASHBOARD: dict[str, Any] = json.loads(PATH.read_text())
ROWS = [panel for panel in DASHBOARD["panels"] if panel["type"] == "row"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """Of each query its panel and legend, and itself."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield f"{panel['title']}: {target['legendFormat']}", target["expr"]


def test_it_is_what_its_generator_makes() -> None:
    if importlib.util.find_spec("grafana_foundation_sdk") is None:
        missing = "grafana-foundation-sdk (extra `dev`) is not installed"
        if os.environ.get("DISPATCHER_REQUIRE_TOOLS") == "1":
            pytest.fail(missing)
        pytest.skip(f"{missing.upper()}: THE DASHBOARD IS NOT COMPARED WITH ITS GENERATOR")
    from deploy.grafana.generator.dashboard import as_json  # noqa: PLC0415 - it may be absent

    assert PATH.read_text() == as_json(), "run: python -m deploy.grafana.generator"


def test_it_has_a_row_for_each_theme() -> None:
    assert [row["title"].partition(":")[0].lower() for row in ROWS] == [
        "health", "ranks", "balance", "flow", "buffer", "freshness", "the dispatcher itself",
    ]  # fmt: skip
    assert all(not row["collapsed"] and row["panels"] == [] for row in ROWS)
    assert DASHBOARD["uid"] == "rollout-dispatcher"
    assert DASHBOARD["schemaVersion"] >= 39
    assert "id" not in DASHBOARD, "Grafana gives it one"


def test_ids_and_titles_are_unique() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in PANELS:
        of_targets = [target["refId"] for target in panel["targets"]]
        assert len(of_targets) == len(set(of_targets)), panel["title"]


def test_no_panel_lies_on_another_or_beside_the_grid() -> None:
    cells = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert [cell for cell in cells if cell["x"] + cell["w"] > 24 or cell["h"] < 1] == []
    assert [pair for pair in combinations(cells, 2) if _overlap(*pair)] == []


def _overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    across = one["x"] < other["x"] + other["w"] and other["x"] < one["x"] + one["w"]
    return across and one["y"] < other["y"] + other["h"] and other["y"] < one["y"] + one["h"]


def test_variables_choose_prometheus_job_and_instance() -> None:
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    source = {"type": "prometheus", "uid": "${datasource}"}
    for name in ("job", "instance"):
        assert variables[name]["datasource"] == source
    for panel in PANELS:
        assert panel["datasource"] == source, panel["title"]
        assert all(target["datasource"] == source for target in panel["targets"]), panel["title"]


@pytest.mark.parametrize(
    "title", [title for title, text in queries() if re.search(r"_(step|rank_compute)_\w+", text)]
)
def test_what_is_told_once_a_step_is_asked_for_over_a_range_that_is_chosen(title: str) -> None:
    """A step of minutes is longer than what Grafana takes by itself: there would be no number."""
    text = dict(queries())[title]
    assert "[$over]" in text
    assert "$__rate_interval" not in text
    (variable,) = (each for each in DASHBOARD["templating"]["list"] if each["name"] == "over")
    assert variable["current"]["value"] in variable["query"].split(",")


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_says_what_it_shows_in_a_unit_and_of_the_chosen_dispatcher(
    panel: dict[str, Any],
) -> None:
    assert re.fullmatch(r".{30,}[.]", panel["description"])
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["color"] == "green"
    assert panel["targets"]
    for target in panel["targets"]:
        selectors = re.findall(
            r"(?<!\w)(?:dispatcher|process|scrape)_\w+(\{[^}]*\})?", target["expr"]
        )
        chosen = 'job="$job",instance="$instance"'
        assert all(chosen in selector for selector in selectors), target["expr"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_links_and_descriptions_name_documents_and_options_that_exist(
    panel: dict[str, Any],
) -> None:
    assert named(panel["description"]) <= FLAGS
    for path in re.findall(r"docs/[\w.-]+\.md", panel["description"]):
        assert (ROOT / path).exists(), path


def test_links_lead_to_documents() -> None:
    for link in DASHBOARD["links"]:
        file, _, heading = link["url"].removeprefix("$docs/").partition("#")
        assert leads(ROOT / "README.md", file, heading), link["url"]
