"""A real Prometheus answers every query of the dashboard after a short real run."""

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from tests.deploy.alerts.record import RULES
from tests.deploy.alerts.test_alerts import scaled
from tests.deploy.runs import OPTIONS, RANKS, Conditions, Run, tailed_lengths
from tests.deploy.test_dashboard import DASHBOARD, queries
from tests.e2e.harness import running
from tests.e2e.test_prometheus import config_for, query
from tests.support.addresses import free_port
from tests.support.server import ServeProcess, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

#: Than the shipped configuration scrapes: some 75 times. Rules of ten minutes take five seconds.
FASTER = 120

Asks = Callable[[str], list[float]]


@pytest.fixture(scope="module")
def seen(
    tmp_path_factory: pytest.TempPathFactory, tool: Callable[[str], str]
) -> Iterator[tuple[Asks, ServeProcess]]:
    """A Prometheus that has seen a run with a journal, a slow rank, long and stale samples."""
    folder = tmp_path_factory.mktemp("dashboard")
    more = {"journal_dir": folder / "journal", "max_staleness": 8, "layout": "padded"}
    options: dict[str, Any] = OPTIONS | more
    conditions = Conditions(step_s=0.05, slow_rank=2, old_every=5, lengths=tailed_lengths)
    with ExitStack() as stack:
        server = stack.enter_context(ServeProcess(folder, warm=True, **options))
        port, config = free_port(), config_for(server.http, folder)
        (folder / "alerts.yml").write_text(scaled(RULES.read_text(), FASTER))
        stack.enter_context(
            running(
                tool("prometheus"),
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            )
        )

        def ask(expression: str) -> list[float]:
            text = expression.replace("$job", "dispatcher").replace("$instance", server.http)
            for variable in ("$__rate_interval", "$over"):
                text = text.replace(variable, "5s")
            found = query(port, text)
            return [float(each["value"][1]) for each in found]

        eventually(lambda: ask("dispatcher_ready"), "Prometheus scrapes", 60)
        with Run(server.endpoint, conditions):
            stale = 'dispatcher_samples_dropped_total{reason="stale"} > 0'
            eventually(lambda: ask(stale), "old samples are dropped", 60)
            eventually(
                lambda: ask("dispatcher_measured_steps_total > 20"), "steps are measured", 60
            )
            time.sleep(2)  # rates need some scrapes
            yield ask, server


@pytest.mark.parametrize(
    "expression", [pytest.param(expression, id=title) for title, expression in queries()]
)
def test_every_query_has_an_answer(seen: tuple[Asks, ServeProcess], expression: str) -> None:
    ask, _ = seen

    def is_answered() -> bool:
        values = ask(expression)
        return bool(values) and not any(math.isnan(value) for value in values)

    eventually(is_answered, "numbers for an answer")


def test_every_metric_and_label_is_in_the_exposition(seen: tuple[Asks, ServeProcess]) -> None:
    _, server = seen
    exposition = server.get("/metrics").text
    for title, expression in queries():
        for name, labels in re.findall(r"((?:dispatcher|process)_\w+)\{([^}]*)\}", expression):
            lines = [line for line in exposition.splitlines() if re.match(rf"{name}[{{ ]", line)]
            assert lines, f"{title}: no {name}"
            for label in re.findall(r"(\w+)=~?\"", labels):
                there = label in {"job", "instance"} or any(f'{label}="' in line for line in lines)
                assert there, f"{title}: {name} has no {label}"
        for label in re.findall(r"\{\{(\w+)\}\}", title):
            assert f'{label}="' in exposition, title


def is_one(ask: Asks, expression: str) -> bool:
    """Where a scrape was late there is none for a moment."""
    return len(ask(expression)) == 1


def test_variables_find_the_dispatcher(seen: tuple[Asks, ServeProcess]) -> None:
    ask, _ = seen
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
            assert found is not None
            expression = f"group by ({found[2]}) ({found[1]})"
            eventually(partial(is_one, ask, expression), f"one answer to {expression}")


def test_the_headline_names_the_slow_rank(seen: tuple[Asks, ServeProcess]) -> None:
    (slowness,) = [text for title, text in queries() if title.startswith("Slowness by rank")]

    def names_it() -> bool:
        values = seen[0](slowness)
        return len(values) == RANKS and max(values) == pytest.approx(1.4, rel=0.1)

    eventually(names_it, "one rank is 1.4 times as slow", 60)


def test_an_alert_names_the_slow_rank(seen: tuple[Asks, ServeProcess]) -> None:
    firing = 'ALERTS{alertname="RankSlow",alertstate="firing",dp_rank="2"}'
    eventually(lambda: seen[0](firing), "the alert fires", 60)
    assert is_one(seen[0], 'ALERTS{alertname="RankSlow"}')
