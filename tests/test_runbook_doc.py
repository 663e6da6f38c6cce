"""docs/runbook.md, the rules and the metrics: a section for each alert, about what is there."""

import re

import pytest

from tests.support.options import FLAGS, named
from tests.support.source import ROOT
from tests.test_metrics_doc import families

RULES = (ROOT / "deploy/prometheus/alerts.yml").read_text()
TEXT = (ROOT / "docs/runbook.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE))
ALERTS = dict(re.findall(r"alert: (\w+)\n(.*?)(?=- alert:|\Z)", RULES, re.DOTALL))
SUFFIXES = ("", "_total", "_bucket", "_sum", "_count", "_info")
METRICS = {family.name + suffix for family in families() for suffix in SUFFIXES}


def test_each_alert_has_its_section_and_each_section_an_alert() -> None:
    assert SECTIONS.keys() == ALERTS.keys()


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_leads_to_its_section_and_says_how_bad_it_is(alert: str) -> None:
    (url,) = re.findall(r"runbook_url: (\S+)", ALERTS[alert])
    assert url == f"docs/runbook.md#{alert.lower()}"
    for needed in ("summary: ", "description: "):
        assert needed in ALERTS[alert]
    assert re.search(r"severity: (critical|warning|info)\b", ALERTS[alert])


@pytest.mark.parametrize("alert", ALERTS)
def test_a_section_says_what_to_look_at_and_what_to_do(alert: str) -> None:
    assert "\n- Look at: " in SECTIONS[alert]
    assert "\n- Do" in SECTIONS[alert]


@pytest.mark.parametrize("text", [RULES, TEXT], ids=["rules", "runbook"])
def test_what_is_named_is_there(text: str) -> None:
    assert set(re.findall(r"\bdispatcher_[a-z_]+", text)) - METRICS == set()
    assert named(text) - FLAGS == set()
