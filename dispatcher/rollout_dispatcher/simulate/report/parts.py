"""What pages are made of: a document in the reader's light or dark, tiles, figures with plots.

A plot is drawn twice, for a wide page and for a narrow one, and the reader sees the one that fits:
a picture that is only scaled down cannot be read.
"""

from collections.abc import Callable, Iterable, Sequence
from html import escape

from rollout_dispatcher.simulate.report.style import STYLE

#: Pixels of a plot, on pages that are wider than STYLE's break and on others.
WIDE, NARROW = 860, 420

#: A plot of so many pixels.
Draw = Callable[[int], str]


def document(title: str, head: Iterable[str], sections: Iterable[str], footer: str) -> str:
    """A whole page. head: lines under the title; footer: HTML."""
    return _DOCUMENT.format(
        title=escape(title),
        style=STYLE,
        head="".join(f"<p>{escape(line)}</p>" for line in head),
        body="\n".join(sections),
        footer=footer,
    )


def figure(title: str, text: str, draw: Draw) -> str:
    """A question, what is to be seen, and the plot that answers it."""
    return (
        f"<figure><figcaption><h2>{escape(title)}</h2><p>{escape(text)}</p></figcaption>"
        f"<div class='wide'>{draw(WIDE)}</div><div class='narrow'>{draw(NARROW)}</div></figure>"
    )


def tiles(shown: Sequence[tuple[str, str]], advice: str = "") -> str:
    """Figures with a word for each, and what follows from them."""
    cells = "".join(
        f"<div class='tile'><b>{escape(value)}</b><span>{escape(text)}</span></div>"
        for value, text in shown
    )
    said = f"<p class='advice'>{escape(advice)}</p>" if advice else ""
    return f"<section class='tiles'>{cells}</section>{said}"


def table(title: str, head: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    """head: each column's heading and unit."""
    heads = "".join(f"<th>{escape(name)}<small>{escape(unit)}</small></th>" for name, unit in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f"<section class='rows'><h2>{escape(title)}</h2><div class='scroll'><table><thead><tr>"
        f"{heads}</tr></thead><tbody>{lines}</tbody></table></div></section>"
    )


_DOCUMENT = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<header><h1>{title}</h1>{head}</header>
{body}
<footer>{footer}</footer>
</main>
</body>
</html>
"""
