"""The figures in docs/ are those of the committed results, and the commands in them exist.

python -m tests.test_docs    writes the tables again, from docs/results
"""

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from rollout_dispatcher.cli.main import COMMANDS
from rollout_dispatcher.cli.options import NO_DEFAULTS, Layer, load_config
from rollout_dispatcher.cli.simulate_options import SimulateOptions
from rollout_dispatcher.service.config.serve import ServeConfig
from tests.results import files
from tests.results.measure import COMMANDS as MEASUREMENTS
from tests.results.measure import without_single_runs
from tests.results.tables import DOCS, TABLES, place, write_all
from tests.support.generated import between, names, without_generated
from tests.support.source import ROOT

EVERY_TEXT = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
PARTS = [(document, name) for document, parts in TABLES.items() for name in parts]


@pytest.mark.parametrize(("document", "name"), PARTS)
def test_a_table_says_what_its_result_file_says(document: str, name: str) -> None:
    text = place(document).read_text()
    start, stop = between(text, name)
    assert text[start:stop] == TABLES[document][name]() + "\n", "run: python -m tests.test_docs"


@pytest.mark.parametrize("document", TABLES)
def test_a_document_has_no_generated_part_that_nothing_writes(document: str) -> None:
    assert sorted(names(place(document).read_text())) == sorted(TABLES[document])


#: Other pages have tables of rules as well, with numbers that are no measurement's.
OF_RULES = {"README.md", "guide.md", "losses.md", "planner.md"}


@pytest.mark.parametrize("document", sorted(TABLES.keys() - OF_RULES))
def test_no_figure_stands_in_a_table_that_nothing_writes(document: str) -> None:
    assert list(figures_by_hand(without_generated(place(document).read_text()))) == []


@pytest.mark.parametrize(
    "table",
    ["| rate |\n|---|\n| 12 |", "```\nrate 1.5\n```", "```console\n$ run\nrate 1.5\n```"],
)
def test_a_figure_by_hand_is_found(table: str) -> None:
    assert list(figures_by_hand(f"Text.\n\n{table}\n\nMore.\n"))


@pytest.mark.parametrize(
    "text", ["```sh\nrun --rate 1.5\n```", "| a | b |\n|---|---|", "Of 12.", "| FSDP2 |"]
)
def test_what_is_no_figure_in_a_table_is_let_be(text: str) -> None:
    assert list(figures_by_hand(text)) == []


def figures_by_hand(text: str) -> Iterator[str]:
    """Rows of tables, and lines of printed output (not commands, files or code), with digits.

    Those of a name (FSDP2) are none.
    """
    fence: str | None = None
    typed = False
    for line in text.splitlines():
        if line.startswith("```"):
            fence = line.removeprefix("```") if fence is None else None
            continue
        typed = fence is not None and (line.startswith("$ ") or typed)  # a command, or more of it
        shown = line.startswith("|") if fence is None else fence in {"", "text", "console"}
        if shown and not typed and re.search(r"(?<![A-Za-z\d])\d", line):
            yield line
        typed = typed and line.endswith("\\")


def test_every_result_file_is_measured_by_a_command_and_shown() -> None:
    held = {path.stem for path in files.FOLDER.glob("*.json")}
    assert held >= MEASUREMENTS.keys()
    for name, command in MEASUREMENTS.items():
        assert files.load(name).command == command


def test_a_result_file_says_when_and_on_what_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    files.save("rates", "python -m rates --json FILE", [{"rate": 1.5}])
    read = files.load("rates")
    assert (read.command, read.figures) == ("python -m rates --json FILE", [{"rate": 1.5}])
    assert read.machine == files.this_machine()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", read.date)
    assert read.machine.python in str(read)


def test_of_single_runs_the_extremes_are_kept() -> None:
    rows = [{"name": "a", "value": 2.0, "runs": [3.0, 1.0, 2.0]}]
    assert without_single_runs(rows) == [
        {"name": "a", "value": 2.0, "lowest": 1.0, "highest": 3.0, "runs": 3}
    ]


# -- links ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*EVERY_TEXT, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_every_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    links = re.findall(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)", path.read_text())
    assert [f"{file}#{heading}" for file, heading in links if not leads(path, file, heading)] == []


@pytest.mark.parametrize("path", EVERY_TEXT, ids=lambda path: path.name)
def test_no_section_is_empty(path: Path) -> None:
    """Merges leave such headings behind."""
    prose = re.sub(r"^```.*?^```", "code", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in prose.splitlines() if line]
    depths = [len(line) - len(line.lstrip("#")) for line in lines]
    at = zip(lines, depths, [*depths[1:], 1], strict=True)
    assert [line for line, own, following in at if 0 < following <= own] == []


def test_a_link_to_nothing_is_noticed() -> None:
    readme = ROOT / "README.md"
    assert leads(readme, "docs/guide.md", "no-step-comes")
    assert not leads(readme, "docs/guide.md", "no-step")
    assert not leads(readme, "docs/guides.md", "")


def leads(path: Path, file: str, heading: str) -> bool:
    """Whether there is such a file beside `path` and, if one is named, such a heading in it."""
    there = path.parent / file if file else path
    return there.exists() and (not heading or heading in headings(there))


def headings(path: Path) -> set[str]:
    """As GitHub names them in addresses."""
    found = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in found}


# -- commands ---------------------------------------------------------------------------------


def commands(path: Path) -> list[str]:
    """Every command in the blocks of a text, and in its prose between backticks."""
    text = path.read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    blocks += re.findall(r"^\$ ((?:.*\\\n)*.*)$", text, flags=re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [line.split(" #")[0].split(" && ")[0].split(" > ")[0].strip() for line in lines]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    found += [" ".join(each.split()) for each in re.findall(r"`((?:make|python)\s[^`]+)`", prose)]
    return [one for one in found if re.match(r"(dispatcher|make|python) ", one)]


#: What a recorded run has said itself, of the options that have no default.
OF_A_RECORD = {"dp_size": 8, "global_batch_size": 64, "micro_batch_size": 1}
QUOTED = sorted({(path.name, one) for path in EVERY_TEXT for one in commands(path)})


@pytest.mark.parametrize(("document", "command"), QUOTED)
def test_a_command_that_is_quoted_exists_and_takes_these_options(
    document: str, command: str, secrets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(secrets)
    program, *words = shlex.split(command)
    {"dispatcher": _dispatcher, "make": _make, "python": _python}[program](words)


def test_commands_are_quoted_in_every_document_of_figures() -> None:
    assert TABLES.keys() <= {document for document, _ in QUOTED}


def _dispatcher(words: list[str]) -> None:
    name, *argv = words
    assert name in COMMANDS
    if name == "serve":
        load_config(ServeConfig, argv, {}, prog="dispatcher serve")
    if name == "simulate":

        def defaults(source: str | None) -> Layer:
            return ("a record", OF_A_RECORD) if source == "DIR" else NO_DEFAULTS

        flags = ["--format=json" if word == "--json" else word for word in argv]
        load_config(
            SimulateOptions, flags, {}, prog="dispatcher simulate", takes="DIR", defaults=defaults
        )


def _make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert words[0] in targets


def _python(words: list[str]) -> None:
    if words[0] != "-m":
        assert (ROOT / words[0]).is_file()
        return
    assert importlib.util.find_spec(words[1]) is not None
    flags = [word for word in words if word.startswith("--")]
    assert not flags or all(flag in _help(words[1]) for flag in flags)


@cache
def _help(module: str) -> str:
    command = [sys.executable, "-m", module, "--help"]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


if __name__ == "__main__":
    write_all()
