"""Every alert fires where what it is for has really happened, and is quiet elsewhere."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.alerts.record import FOLDER, RULES
from tests.deploy.alerts.scenarios import SCALE, SCENARIOS, WELL_S

ALERTS = set(re.findall(r"alert: (\w+)", RULES.read_text()))
#: Runs in which all is well, or ordinary.
QUIET = {name for name, scenario in SCENARIOS.items() if not scenario.fires | scenario.clears}
SECONDS = {"s": 1, "m": 60, "h": 3600}


def test_there_is_a_run_for_every_alert_and_of_every_scenario() -> None:
    fired = set.union(*(set(scenario.fires) for scenario in SCENARIOS.values()))
    assert fired == ALERTS
    assert {path.stem for path in FOLDER.glob("*.yml")} == SCENARIOS.keys()
    assert {"healthy", "pause", "weight_syncs", "not_separated", "in_turn", "right_cost"} == QUIET


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_fires_what_it_should_and_nothing_else(
    tmp_path: Path, tool: Callable[[str], str], name: str
) -> None:
    (tmp_path / "alerts.yml").write_text(scaled(RULES.read_text()))
    (tmp_path / "test.yml").write_text(rule_test(name))
    done = subprocess.run(
        [tool("promtool"), "test", "rules", "test.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def scaled(rules: str, scale: int = SCALE) -> str:
    """The same rules with durations divided, as in a run that is scraped so much faster."""

    def divide(found: re.Match[str]) -> str:
        before, number, unit, after = found.groups()
        return f"{before}{int(number) * SECONDS[unit] // scale}s{after}"

    text = re.sub(r"(\[)(\d+)([smh])(\])", divide, rules)
    return re.sub(r"(for: )(\d+)([smh])(\b)", divide, text)


def rule_test(name: str) -> str:
    """A test for promtool: nothing fires while all is well, and in the end exactly what should."""
    scenario = SCENARIOS[name]
    end = WELL_S + scenario.lasts - 1
    trouble = scenario.fires or scenario.clears
    expected = dict.fromkeys(range(0, WELL_S if trouble else end, 5), frozenset[str]())
    expected |= {WELL_S + scenario.lasts // 2: scenario.clears} if scenario.clears else {}
    expected[end] = scenario.fires
    return "\n".join(
        [
            "rule_files: [alerts.yml]",
            "evaluation_interval: 1s",
            "tests:",
            f"- name: {name}",
            "  interval: 1s",
            "  input_series:",
            *("  " + line for line in (FOLDER / f"{name}.yml").read_text().splitlines()),
            "  promql_expr_test:",
            *(line for at, alerts in expected.items() for line in _expected(at, alerts)),
            "",
        ]
    )


def _expected(second: int, alerts: frozenset[str]) -> list[str]:
    firing = 'group by (alertname) (ALERTS{alertstate="firing"})'
    samples = [
        f"    - {{labels: '{{alertname=\"{alert}\"}}', value: 1}}" for alert in sorted(alerts)
    ]
    return [
        f"  - expr: '{firing}'",
        f"    eval_time: {second}s",
        *(["    exp_samples:", *samples] if samples else ["    exp_samples: []"]),
    ]
