"""Ten faults in real runs: within a minute one query, one alert and `/readyz` say which it is.

A real dispatcher, ranks and a producer over real sockets, and a real Prometheus with the rules that
we ship. Steps take 0.4 s and not half a minute, so durations in the rules are divided by `SCALE`.
"""

import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from tests.deploy.alerts.record import RULES, serving
from tests.deploy.alerts.scenarios import SCENARIOS, Scenario, Scene
from tests.deploy.alerts.test_alerts import scaled
from tests.deploy.runs import Conditions, Run
from tests.e2e.harness import running
from tests.e2e.test_prometheus import config_for, query
from tests.support.addresses import free_port
from tests.support.server import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.timeout(300)]

SCALE = 60
WITHIN_S = 60.0
#: By scenario the ledger's word, none where there is no dispatcher to say it, and an alert.
FAULTS = {
    "rank_slow": ("slow-rank", "RankTimeLost"),
    "excess": ("lengths", "RankTimeLost"),
    "stalled": ("no-samples", "RanksStarved"),
    "all_stale": ("stale", "RanksHeldUp"),
    "slow_journal": ("journal", "RanksHeldUp"),
    "journal": ("journal", "JournalFailing"),
    "plans": ("dispatcher", "RanksHeldUp"),
    "rank_hung": ("hung-rank", "RankHung"),
    "ranks_missing": ("gone-rank", "RanksMissing"),
    "down": ("", "DispatcherDown"),
}
MOST = 'topk(1, sum by (cause) (rate(dispatcher_rank_time_seconds_total{cause!="work"}[10s])) > 0)'
FIRING = 'ALERTS{alertstate="firing"}'


@dataclass
class Seen:
    """Causes that the query and `/readyz` name as the first, and by alert that fires its cause."""

    asked: str
    told: str
    alerts: dict[str, str]

    def names(self, cause: str, alert: str) -> bool:
        """Whether this cause is named everywhere, and no other."""
        causes = {self.asked, self.told, *filter(None, self.alerts.values()), cause}
        return len(causes) == 1 and alert in self.alerts


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_within_a_minute_and_no_more_once_it_is_over(
    fault: str, tmp_path: Path, tool: Callable[[str], str]
) -> None:
    scenario, (cause, alert) = SCENARIOS[fault], FAULTS[fault]
    with serving(scenario, tmp_path) as server, watching(server.http, tmp_path, tool) as port:
        scene = Scene(Run(server.endpoint, Conditions(**scenario.begins)), server, tmp_path)
        with scene.run:
            time.sleep(10)
            eventually(lambda: is_well(port), "steps are committed, and no alert fires")
            began, second = time.monotonic(), 0
            while not (found := seen(server.http, port)).names(cause, alert):
                assert time.monotonic() < began + WITHIN_S, found
                if time.monotonic() >= began + second:
                    scenario.trouble(scene, second)
                    second += 1
                time.sleep(0.1)
            if scenario.breaks:
                scene.run.failures.clear()
            else:
                mend(scene, scenario)
                eventually(lambda: is_well(port), "the alerts are over", 2 * WITHIN_S)
        if scenario.breaks:
            server.kill()
            server.start()
            eventually(lambda: server.metrics(1) is not None, "it is up")
            with Run(server.endpoint):
                eventually(lambda: is_well(port), "the alerts are over", 2 * WITHIN_S)


def is_well(port: int) -> bool:
    """Whether steps are committed, and no alert fires."""
    steps = query(port, "rate(dispatcher_steps_committed_total[5s]) > 0")
    return bool(steps) and not query(port, FIRING)


def mend(scene: Scene, scenario: Scenario) -> None:
    """What was wrong is over."""
    well = Conditions(**scenario.begins)
    for condition in fields(Conditions):
        setattr(scene.run.now, condition.name, getattr(well, condition.name))
    for file in ("slow", "disk/others"):
        (scene.folder / file).unlink(missing_ok=True)


@contextmanager
def watching(target: str, folder: Path, tool: Callable[[str], str]) -> Iterator[int]:
    """Prometheus watches this dispatcher; yields its port."""
    config = config_for(target, folder)
    (folder / "alerts.yml").write_text(scaled(RULES.read_text(), SCALE))
    with running(
        tool("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{(port := free_port())}",
    ):  # fmt: skip
        yield port


def seen(http: str, port: int) -> Seen:
    """What is to be seen now."""
    (asked,) = query(port, MOST) or [{"metric": {"cause": ""}}]
    told = re.search(r"lost: .*?: \S+ % ([\w-]+)", ready(http))
    firing = [each["metric"] for each in query(port, FIRING)]
    return Seen(
        asked["metric"]["cause"],
        told[1] if told else "",
        {alert["alertname"]: alert.get("cause", "") for alert in firing},
    )


def ready(http: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{http}/readyz", timeout=5) as answer:
            return str(answer.read(), "utf-8")
    except urllib.error.HTTPError as error:
        return str(error.read(), "utf-8")
    except OSError:
        return ""
