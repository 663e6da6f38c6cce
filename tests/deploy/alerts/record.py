"""Runs every scenario for real, and keeps what Prometheus would have seen of it.

python -m tests.deploy.alerts.record [NAME ...]    writes series/NAME.yml (5 minutes for all)
"""

import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.alerts.process import Process
from tests.deploy.alerts.scenarios import SCENARIOS, WELL_S, Scenario, Scene
from tests.deploy.runs import OPTIONS, Conditions, Run
from tests.support.disks import small_disk
from tests.support.server import eventually
from tests.support.source import ROOT

FOLDER = Path(__file__).with_name("series")
RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"
TARGET = {"job": "dispatcher", "instance": "a"}
#: At a time: more would be late on a small machine, and lateness is in what is recorded.
AT_A_TIME = 6
DISK_MB = 64
#: When a series had no value, or ended.
MISSING, ENDED = "_", "stale"


def used() -> set[str]:
    """Every metric that a rule asks for."""
    return set(re.findall(r"\b((?:dispatcher|process)_\w+|up)\b[{\[ )\n]", RULES.read_text()))


class Recorder:
    """Series as promtool takes them: a value for each second since the beginning."""

    def __init__(self) -> None:
        self._began = time.time()
        self._used = used()
        self._values: dict[str, list[str]] = {}
        self._scrapes = 0

    def scrape(self, text: str | None) -> None:
        """Note what was found, or that nothing was."""
        found = {_series("up", {}): "1" if text is not None else "0"}
        for family in text_string_to_metric_families(text or ""):
            for sample in family.samples:
                if sample.name in self._used:
                    value = sample.value
                    if sample.name.endswith(("_timestamp_seconds", "_time_seconds")):
                        value -= self._began  # promtool's time begins at 0
                    found[_series(sample.name, sample.labels)] = f"{value:.6g}"
        for name in self._values.keys() | found.keys():
            known = self._values.setdefault(name, [MISSING] * self._scrapes)
            had = bool(known) and known[-1] not in {MISSING, ENDED}
            known.append(found.get(name, ENDED if had else MISSING))
        self._scrapes += 1

    def text(self) -> str:
        """Each series with its values, those that repeat written once."""
        lines = []
        for name, values in sorted(self._values.items()):
            runs = ((value, len(list(same))) for value, same in groupby(values))
            written = " ".join(
                " ".join([value] * times)
                if times < 3 or value == ENDED
                else f"{value}x{times if value == MISSING else times - 1}"
                for value, times in runs
            )
            lines.append(f"- series: '{name}'\n  values: '{written}'\n")
        return "".join(lines)


def _series(name: str, labels: dict[str, str]) -> str:
    every = ",".join(f'{key}="{value}"' for key, value in (TARGET | labels).items())
    return f"{name}{{{every}}}"


@contextmanager
def serving(scenario: Scenario, folder: Path) -> Iterator[Process]:
    """The dispatcher of a scenario, on its disk."""
    with ExitStack() as stack:
        options, module = OPTIONS | dict(scenario.options), "rollout_dispatcher.cli.main"
        if scenario.disk:
            disk = stack.enter_context(small_disk(folder / "disk", DISK_MB))
            options |= {"journal_dir": disk / "journal"}
            module = "tests.e2e.groups.small_journal"
        if scenario.slow_disk:
            options |= {"journal_dir": folder / "journal"}
            module = "tests.deploy.alerts.slow_disk"
        server = Process(folder, options, module)
        stack.callback(server.kill)
        eventually(lambda: server.metrics(1) is not None, "it is up")
        yield server


def record(name: str) -> str:
    """Run one scenario to its end; returns its series."""
    scenario = SCENARIOS[name]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(serving(scenario, folder))
        recorder = Recorder()
        run = Run(server.endpoint, Conditions(**scenario.begins))
        try:
            with run:
                _watch(scenario, Scene(run, server, folder), recorder)
                if scenario.breaks:
                    run.failures.clear()
        except (OSError, EOFError, AssertionError):
            print((folder / "serve.log").read_text()[-2000:], file=sys.stderr)
            raise
    return recorder.text()


def _watch(scenario: Scenario, scene: Scene, recorder: Recorder) -> None:
    began = time.monotonic()
    for second in range(WELL_S + scenario.lasts):
        time.sleep(max(0.0, began + second - time.monotonic()))
        trouble = threading.Thread(target=scenario.trouble, args=(scene, second - WELL_S))
        if second >= WELL_S:
            trouble.start()
        recorder.scrape(scene.server.metrics(within=0.95))
        if second >= WELL_S:
            trouble.join()


def save(name: str) -> str:
    """Record a scenario and keep it; returns a word on it."""
    head = f"# Of a real run: python -m tests.deploy.alerts.record {name}\n"
    text = head + record(name)
    (FOLDER / f"{name}.yml").write_text(text)
    return f"{name}: {len(text)} characters"


def main(names: list[str]) -> None:
    """Record these, or all; what fails keeps no other one from being kept."""
    FOLDER.mkdir(exist_ok=True)
    with ProcessPoolExecutor(AT_A_TIME) as pool:
        done = [pool.submit(save, name) for name in names or SCENARIOS]
    for each in done:
        print(each.result(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
