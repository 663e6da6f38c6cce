"""docs/settings.md has every option of `serve`. Its commands: test_docs.py.

python -m tests.test_settings_doc    writes the table again
"""

from rollout_dispatcher.cli.options import format_value
from rollout_dispatcher.cli.problems import flag_of
from rollout_dispatcher.service.config.serve import ServeConfig
from tests.support.generated import between, rewrite
from tests.support.source import ROOT

DOC = ROOT / "docs" / "settings.md"


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


def test_the_table_is_up_to_date() -> None:
    text = DOC.read_text()
    start, stop = between(text, "settings")
    assert text[start:stop] == settings_table() + "\n", "run: python -m tests.test_settings_doc"


def main() -> None:
    """Write the table into the document."""
    rewrite(DOC, {"settings": settings_table})


if __name__ == "__main__":
    main()
