"""docs/settings.md has every option of `serve`. Its commands: test_docs.py.

python -m tests.test_settings_doc    writes the table again
"""

from collections.abc import Callable
from functools import partial

import pytest

from rollout_dispatcher.cli.options import format_value, themes
from rollout_dispatcher.cli.problems import flag_of, set_flag_of
from rollout_dispatcher.service.config.serve import ServeConfig
from tests.support.generated import between, rewrite
from tests.support.source import ROOT

DOC = ROOT / "docs" / "settings.md"


def settings_table(*, advanced: bool) -> str:
    """A row an option of `serve`: those that are flags, or the others."""
    rows = ["| option | default | what it does |", "|---|---|---|"]
    for theme, fields in themes(ServeConfig, advanced=advanced).items():
        rows.append(f"| **{theme}** | | |")
        for name, field in fields.items():
            default = "required"
            if not field.is_required():
                shown = field.default is not None
                default = f"`{format_value(field, field.default)}`" if shown else "unset"
            about = " ".join((field.description or "").split())
            written = f"{set_flag_of(name)}=" if advanced else flag_of(name)
            rows.append(f"| `{written}` | {default} | {about} |")
    return "\n".join(rows)


TABLES: dict[str, Callable[[], str]] = {
    "settings": partial(settings_table, advanced=False),
    "advanced": partial(settings_table, advanced=True),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_table_is_up_to_date(name: str) -> None:
    text = DOC.read_text()
    start, stop = between(text, name)
    assert text[start:stop] == TABLES[name]() + "\n", "run: python -m tests.test_settings_doc"


def main() -> None:
    """Write the tables into the document."""
    rewrite(DOC, TABLES)


if __name__ == "__main__":
    main()
