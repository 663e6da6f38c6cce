"""Rows as they are printed."""

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


RANDOM_HEADING = (
    f"{'random':12} {'peer':22} {'cases':>6} {'p95':>9} {'worst':>9} {'same number':>11}"
    f" {'more mb':>8} {'fewer mb':>8} {'over':>5} {'theirs':>6}"
)


def random_line(row: dict[str, Any]) -> str:
    """A corner and a peer: ours less theirs, in points of step time."""

    def points(name: str) -> str:
        return "-" if row[name] is None else f"{100 * row[name]:+.2f}"

    return (
        f"{row['corner']:12} {row['peer']:22} {row['cases']:6} {points('p95'):>9}"
        f" {points('worst'):>9} {points('worst_same_number'):>11} {row['more_micro_batches']:8}"
        f" {row['fewer_micro_batches']:8} {row['ours_over_cap']:5} {row['peer_over_cap']:6}"
        + (f"  ours unanswered {row['ours_unanswered']}: {row['why']}" if row["why"] else "")
    )
