r"""Draws panels of the dashboard from a real Prometheus, where no Grafana is at hand.

    python -m tests.deploy.panels http://127.0.0.1:9090 panels.html --panel Slowness\ by\ rank

A panel is an SVG in one page of HTML; those without data in this time are left out.
"""

import argparse
import json
import re
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from tests.deploy.test_dashboard import PANELS

COLOURS = (
    "#3b82f6", "#d97706", "#059669", "#dc2626", "#7c3aed",
    "#64748b", "#db2777", "#0891b2", "#84cc16",
)  # fmt: skip
WIDTH, HEIGHT, POINTS = 420, 130, 120

Line = tuple[str, list[tuple[float, float]]]


def lines(prometheus: str, panel: dict[str, Any], instance: str, seconds: float) -> list[Line]:
    """Return the panel's series over the last `seconds`, each with the name in its legend."""
    given = {"job": "dispatcher", "instance": instance}
    now, found = time.time(), list[Line]()
    for target in panel["targets"]:
        query = re.sub(r"\$\{?(\w+)(:\w+)?\}?", lambda m: given.get(m[1], "1m"), target["expr"])
        asked = {"query": query, "start": now - seconds, "end": now, "step": seconds / POINTS}
        with urlopen(f"{prometheus}/api/v1/query_range?{urlencode(asked)}") as answer:
            series = json.load(answer)["data"]["result"]
        for one in series:
            name = target["legendFormat"]
            for label, value in one["metric"].items():
                name = re.sub(rf"\{{\{{\s*{label}\s*\}}\}}", value, name)
            points = [(at, float(value)) for at, value in one["values"] if value != "NaN"]
            found.append((name, points))
    return [line for line in found if line[1]]


def drawn(title: str, found: Sequence[Line]) -> str:
    """Return the panel as SVG in HTML, from 0 up to the largest value."""
    points = [point for _, line in found for point in line]
    first, last = min(at for at, _ in points), max(at for at, _ in points)
    top = max(1e-9, *(value for _, value in points))
    x, y = WIDTH / max(last - first, 1.0), HEIGHT / top
    paths, names = [], []
    for (name, line), colour in zip(found, COLOURS * len(found), strict=False):
        path = " ".join(f"{(at - first) * x:.1f},{HEIGHT - value * y:.1f}" for at, value in line)
        paths.append(
            f'<polyline points="{path}" stroke="{colour}" fill="none" stroke-width="1.5"/>'
        )
        names.append(f'<span style="color:{colour}">{escape(name)} {line[-1][1]:.3g}</span>')
    box = f'<svg viewBox="0 -4 {WIDTH} {HEIGHT + 8}" width="{WIDTH}">{"".join(paths)}</svg>'
    return f"<div><b>{escape(title)}</b> <small>to {top:.3g}</small>{box}{' '.join(names)}</div>"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("prometheus")
    parser.add_argument("page", type=Path)
    parser.add_argument("--instance", default="127.0.0.1:9471")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--panel", action="append", help="of this title alone; may be repeated")
    options = parser.parse_args()
    style = "body{font:13px sans-serif;display:grid;grid-template-columns:repeat(2,1fr);gap:18px}"
    page = [f"<!doctype html><meta charset=utf-8><style>{style}svg{{display:block}}</style>"]
    shown = [panel for panel in PANELS if panel["type"] == "timeseries"]
    for panel in shown:
        if options.panel is None or panel["title"] in options.panel:
            found = lines(options.prometheus, panel, options.instance, options.seconds)
            page += [drawn(panel["title"], found)] if found else []
    options.page.write_text("\n".join(page))


if __name__ == "__main__":
    main()
