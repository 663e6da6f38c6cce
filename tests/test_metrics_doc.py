"""docs/metrics.md has every metric of the dispatcher's registry.

python -m tests.test_metrics_doc    writes the table again
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from prometheus_client import Metric

from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.rank_time import MEANS, TimeCause
from rollout_dispatcher.record.writer import RecordWriter
from rollout_dispatcher.service.config.serve import ServeConfig, core_config
from rollout_dispatcher.service.metrics.registry import Metrics
from tests.support.generated import between, rewrite
from tests.support.journaling import open_journal
from tests.support.source import ROOT
from tests.support.words import OWN_WORDS

DOC = ROOT / "docs" / "metrics.md"


def metrics_table() -> str:
    """A row a metric of the dispatcher's registry."""
    rows = ["| metric | type | what it says |", "|---|---|---|"]
    for family in sorted(families(), key=lambda item: (item.name, item.type)):
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        rows.append(f"| `{name}` | {family.type} | {family.documentation} |")
    return "\n".join(rows)


def causes_table() -> str:
    """A row a cause of the ranks' time."""
    rows = ["| cause | a rank is |", "|---|---|"]
    return "\n".join(rows + [f"| `{cause}` | {MEANS[cause]} |" for cause in TimeCause])


def families() -> Iterator[Metric]:
    """What a dispatcher with a journal and a record exports before anything has happened."""
    with TemporaryDirectory() as folder:
        config = ServeConfig(
            dp_size=1, global_batch_size=1, micro_batch_size=1, journal_dir=Path(folder)
        )
        core = DispatcherCore(core_config(config))
        metrics = Metrics(config, core, lambda: 0.0)
        journal = open_journal(config, core, metrics, lambda: 0.0)
        writer = RecordWriter(Path(folder) / "record", 1 << 20, {})
        metrics.watch_record(writer)
        found = list(metrics.registry.collect())
        writer.close(10)
        assert journal is not None
        journal.close()
    for item in found:
        if item.name.startswith("dispatcher_"):
            yield item


def test_the_table_is_up_to_date() -> None:
    text = DOC.read_text()
    start, stop = between(text, "metrics")
    assert text[start:stop] == metrics_table() + "\n", "run: python -m tests.test_metrics_doc"


def test_the_causes_are_up_to_date() -> None:
    text = DOC.read_text()
    start, stop = between(text, "causes")
    assert text[start:stop] == causes_table() + "\n", "run: python -m tests.test_metrics_doc"


def test_help_is_in_the_fields_words() -> None:
    found = [f"{item.name}: {item.documentation}" for item in families()]
    assert not [text for text in found if OWN_WORDS.search(text)]


def main() -> None:
    """Write the tables into the document."""
    rewrite(DOC, {"metrics": metrics_table, "causes": causes_table})


if __name__ == "__main__":
    main()
