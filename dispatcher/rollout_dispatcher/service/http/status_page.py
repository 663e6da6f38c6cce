"""The page at `/`: `/statusz` and `/v1/clients` for people.

A browser loads nothing else, runs no script and refreshes every few seconds. Invariant: every text
is escaped, as clients choose their names.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

REFRESH_SECONDS = 5
#: Clients on the page; `/v1/clients` has all.
MAX_CLIENTS = 200
#: The Content-Security-Policy.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
ELSEWHERE = ("/readyz", "/statusz", "/v1/clients", "/metrics")

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="refresh" content="{refresh}">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif }}
body {{ margin: 1.5rem auto; max-width: 72rem; padding: 0 1rem }}
h1 {{ font-size: 1.3rem }} h2 {{ font-size: 1.05rem; margin: 1.6rem 0 .3rem }}
pre {{ white-space: pre-wrap; border-left: 3px solid #888; padding-left: .8rem }}
div {{ overflow-x: auto }} table {{ border-collapse: collapse }}
th, td {{ text-align: left; padding: .15rem 1.2rem .15rem 0; border-bottom: 1px solid #8884 }}
td {{ font-variant-numeric: tabular-nums; white-space: nowrap }}
td:last-child {{ white-space: normal; min-width: 6rem; overflow-wrap: break-word }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>rollout-dispatcher {version}, at {now}. {links}</p>
<pre>{summary}</pre>
{tables}
</body>
</html>
"""


def page(
    status: Mapping[str, Any], clients: Sequence[Mapping[str, Any]], summary: str, now: str
) -> str:
    """Return HTML. status, summary: `/statusz` as JSON and as text; clients: of `/v1/clients`."""
    tables = [
        _table("Time of DP ranks", ("cause", "last minute", "since the first step"), _time(status)),
        _table(
            "DP ranks",
            ("rank", "state", "step", "computing", "waiting", "slowness", "last message", "client"),
            _ranks(status),
        ),
        _table(
            "Clients",
            ("client", "role", "host", "connected", "samples", "a second", "last error"),
            _clients(clients),
        ),
        _table("Dropped samples", ("reason", "samples"), _counts(status["dropped"])),
        _table("Steps planned", ("trigger", "steps"), _counts(status["steps_planned"])),
    ]
    return PAGE.format(
        refresh=REFRESH_SECONDS,
        title=escape(f"run {status['run_id']}: {status['run_state']}"),
        version=escape(status["version"]),
        now=escape(now),
        links=" ".join(f'<a href="{path}">{path}</a>' for path in ELSEWHERE),
        summary=escape(summary),
        tables="\n".join(tables),
    )


def rank_state(status: Mapping[str, Any], rank: int) -> str:
    """Return whether a DP rank is missing, absent, has left or hangs; empty if it is well."""
    about, absent = status["ranks"].get(str(rank)), rank in status["absent_ranks"]
    if about is None:
        return "missing"
    if rank in status["hung_ranks"]:
        return "hangs"
    if about["connected"]:
        return ""
    return "absent" if absent else "left"


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with its heading, or `none` without rows."""
    body = ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows]
    if not body:
        return f"<h2>{title}</h2>\n<p>none</p>"
    head = "".join(f"<th>{column}</th>" for column in columns)
    lines = "\n".join(f"<tr>{row}</tr>" for row in (head, *body))
    return f"<h2>{title}</h2>\n<div><table>\n{lines}\n</table></div>"


def _time(status: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Yield a row for each cause that has taken time."""
    lost, whole = status["lost"], sum(status["rank_time"].values())
    shares = {"work": 1 - lost["share"], **lost["causes"]} if lost["causes"] else {}
    for cause, seconds in status["rank_time"].items():
        if seconds:
            of_late = f"{shares.get(cause, 0):.1%}" if shares else "-"
            yield cause, of_late, f"{seconds / whole:.1%}, {seconds:,.0f} s"


def _ranks(status: Mapping[str, Any]) -> Iterator[Sequence[object]]:
    last = status["measured"]["last_step"] or {"ranks": []}
    took = {each["dp_rank"]: each for each in last["ranks"]}
    for rank in range(status["dp_size"]):
        about, own = status["ranks"].get(str(rank), {}), took.get(rank, {})
        step = about.get("taken", -1)
        yield (
            rank, rank_state(status, rank) or "connected", "-" if step < 0 else step,
            _figure(own.get("compute_s"), " s"), _figure(own.get("wait_s"), " s"),
            _figure(own.get("slowness")),
            about.get("last_seen", "-"), about.get("client_id", "-"),
        )  # fmt: skip


def _figure(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.3g}{unit}"


def _clients(clients: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[object]]:
    """Yield those that are gone first."""
    for one in sorted(clients, key=lambda one: bool(one["connected"]))[:MAX_CLIENTS]:
        role = one["role"] if one["dp_rank"] is None else f"{one['role']} {one['dp_rank']}"
        rate = f"{one['samples_per_second']:.1f}"
        yield (
            one["client_id"], role, one["host"] or "-", "yes" if one["connected"] else "no",
            one["samples_accepted"], rate, one["last_error"] or "-",
        )  # fmt: skip


def _counts(counts: Mapping[str, int]) -> Iterator[Sequence[object]]:
    return ((name, count) for name, count in counts.items() if count)
