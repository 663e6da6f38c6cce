"""The README tells the truth: its tables are generated. Its links and commands: test_docs.py.

python -m tests.test_readme    writes the tables again
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from prometheus_client import Metric

from rollout_dispatcher.cli.fields import flag_of, format_value
from rollout_dispatcher.core.dispatch import Dispatch
from rollout_dispatcher.service.config.core import core_config
from rollout_dispatcher.service.config.options import ServeConfig
from rollout_dispatcher.service.metrics.registry import Metrics
from tests.support.generated import between, rewrite
from tests.support.journaling import open_journal

README = Path(__file__).parent.parent / "README.md"


def settings_table() -> str:
    """A row an option of `serve`."""
    rows = ["| option | default | what it does |", "|---|---|---|"]
    for name, field in ServeConfig.model_fields.items():
        if name in ServeConfig.HEADINGS:
            rows.append(f"| **{ServeConfig.HEADINGS[name]}** | | |")
        default = "required"
        if not field.is_required():
            shown = field.default is not None
            default = f"`{format_value(field, field.default)}`" if shown else "unset"
        about = " ".join((field.description or "").split())
        rows.append(f"| `{flag_of(name)}` | {default} | {about} |")
    return "\n".join(rows)


def metrics_table() -> str:
    """A row a metric of the dispatcher's registry."""
    rows = ["| metric | type | what it says |", "|---|---|---|"]
    for family in sorted(families(), key=lambda item: (item.name, item.type)):
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        rows.append(f"| `{name}` | {family.type} | {family.documentation} |")
    return "\n".join(rows)


def families() -> Iterator[Metric]:
    """What a dispatcher with a journal exports before anything has happened."""
    with TemporaryDirectory() as folder:
        config = ServeConfig(
            dp_size=1, dispatch_batch_size=1, micro_batch_size=1, journal_dir=Path(folder)
        )
        core = Dispatch(core_config(config))
        metrics = Metrics(config, core, lambda: 0.0)
        journal = open_journal(config, core, metrics, lambda: 0.0)
        found = list(metrics.registry.collect())
        assert journal is not None
        journal.close()
    yield from (item for item in found if item.name.startswith("dispatcher_"))


TABLES = {"settings": settings_table, "metrics": metrics_table}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_up_to_date(name: str) -> None:
    text = README.read_text()
    start, stop = between(text, name)
    assert text[start:stop] == TABLES[name]() + "\n", "run: python -m tests.test_readme"


def main() -> None:
    """Write the tables into the README."""
    rewrite(README, TABLES)


if __name__ == "__main__":
    main()
