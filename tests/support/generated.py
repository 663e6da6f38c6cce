"""Parts of Markdown files that programs write, between markers.

<!-- name: who writes it -->
...
<!-- /name -->
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path


def between(text: str, name: str) -> tuple[int, int]:
    """Where the generated text lies between its markers."""
    start = re.search(rf"<!-- {name}: .* -->\n", text)
    assert start is not None, f"there is no <!-- {name}: ... -->"
    return start.end(), text.index(f"<!-- /{name} -->")


def names(text: str) -> list[str]:
    """The generated parts of a text, in order."""
    return re.findall(r"^<!-- /([\w-]+) -->$", text, flags=re.MULTILINE)


def replaced(text: str, name: str, generated: str) -> str:
    """The text with another content between the markers."""
    start, stop = between(text, name)
    return text[:start] + generated + "\n" + text[stop:]


def rewrite(document: Path, parts: Mapping[str, Callable[[], str]]) -> None:
    """Write these parts of a document again, each as its function says now."""
    text = document.read_text()
    for name, write in parts.items():
        text = replaced(text, name, write())
    document.write_text(text)


def without_generated(text: str) -> str:
    """What people wrote."""
    for name in names(text):
        text = replaced(text, name, "")
    return text
