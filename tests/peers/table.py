"""Rows as they are printed."""

from collections.abc import Sequence
from typing import Any

from tests.peers.measure import is_behind
from tests.peers.problem import Figure

HEADING = f"{'case':66} {'ours':>9} {'peer':>9} {'ratio':>7}  best peer"


def line(row: dict[str, Any]) -> str:
    """A row of the table: a step time is shown as its excess over an even share, in %."""
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
    said = f"{row['case']:66} {shown(row, 'ours'):>9} {shown(row, 'peer'):>9} {ratio:>7}"
    said += f"  {row['best_peer'] or '-'}"
    if row.get("problems", 1) > 1 and row.get("behind"):
        said += f", ahead in {row['behind']} of {row['problems']}"
    if row.get("peer_micro_batches") not in (None, row.get("ours_micro_batches")):
        said += f", micro-batches {row['ours_micro_batches']} to {row['peer_micro_batches']}"
    if is_behind(row):
        said += "  BEHIND"
    return said + (f"  ({row['why']})" if row["why"] else "")


def shown(row: dict[str, Any], side: str) -> str:
    """One figure."""
    value = row[side]
    if value is None:
        return "-"
    if row["figure"] == Figure.TIME:
        return f"{100 * (value - 1):.2f} %"
    return f"{value:.2f} ms" if row["figure"] == Figure.MS else f"{value:.0f}"


RANDOM_CELLS = (
    "random | peers | cases | 95th percentile | worst | worst, equal number of micro-batches | "
    "worst, with micro-batches' start cost | cases over the cap: ours, theirs"
)


def random_cells(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """A corner's random cases in a document: of all peers the figures of the worst for us."""
    answered = [row for row in rows if row["cases"]]
    each = zip(*map(differences, answered), strict=True)
    worst = [max((one for one in found if one is not None), default=None) for found in each]
    return (
        rows[0]["corner"],
        str(len(answered)),
        f"{max(row['cases'] for row in rows)} of {rows[0]['drawn']}",
        *map(points, worst),
        f"{max(row['ours_over_cap'] for row in rows)}, {max(row['peer_over_cap'] for row in rows)}",
    )


def differences(row: dict[str, Any]) -> list[float | None]:
    """How far we are behind; figures of before there was a price have none."""
    names = ("p95", "worst", "worst_same_number", "worst_priced")
    return [row.get(name) for name in names]


def points(value: float | None) -> str:
    """A difference of step times, in points."""
    return "-" if value is None else f"{100 * value:+.2f}"


RANDOM_HEADING = (
    f"{'random':12} {'peer':22} {'cases':>6} {'p95':>9} {'worst':>9} {'same number':>11}"
    f" {'priced':>9} {'more mb':>8} {'fewer mb':>8} {'over':>5} {'theirs':>6}"
)


def random_line(row: dict[str, Any]) -> str:
    """A corner and a peer: ours less theirs, in points of step time."""
    p95, worst, same, priced = map(points, differences(row))
    said = f"{row['corner']:12} {row['peer']:22} {row['cases']:6} {p95:>9} {worst:>9} {same:>11}"
    said += f" {priced:>9}"
    said += f" {row['more_micro_batches']:8} {row['fewer_micro_batches']:8}"
    said += f" {row['ours_over_cap']:5} {row['peer_over_cap']:6}"
    return said + (f"  refused {row['ours_unanswered']}: {row['why']}" if row["why"] else "")
