"""Errors as people read them: a line each in pipes, wrapped and coloured on a terminal."""

import os
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import TextIO

BOLD, RED, PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[0m"


def show_problems(
    problems: Sequence[str], out: TextIO, environ: Mapping[str, str] = os.environ
) -> None:
    """Write what is wrong, each thing by itself."""
    if not out.isatty():
        for problem in problems:
            print(f"dispatcher: {problem}", file=out)
        return
    plain = "NO_COLOR" in environ or environ.get("TERM") == "dumb"
    bold, red, off = ("", "", "") if plain else (BOLD, RED, PLAIN)
    many = f"{len(problems)} things have" if len(problems) > 1 else "one thing has"
    print(f"{red}dispatcher:{off} {many} to be mended first", file=out)
    width = max(30, min(100, shutil.get_terminal_size().columns))
    for problem in problems:
        where, colon, what = problem.partition(": ")
        where, what = (where, what) if colon and len(where) < width else ("", problem)
        if where:
            print(f"\n  {bold}{where}{off}", file=out)
        else:
            print(file=out)
        print(
            textwrap.fill(
                what, width, initial_indent="    ", subsequent_indent="    ",
                break_on_hyphens=False, break_long_words=False,
            ),
            file=out,
        )  # fmt: skip
