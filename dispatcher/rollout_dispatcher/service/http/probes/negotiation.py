"""What a client would rather have: `Accept` and `Accept-Encoding` (RFC 9110, 12.5)."""

from collections.abc import Sequence


def preferred(accept: str | None, offered: Sequence[str]) -> str:
    """Which of these media types, ours first, to answer with: ours where the client likes none.

    Of what it likes alike it gets what it has named, and else the first. Parameters other than
    weights are not looked at.
    """
    if not accept:
        return offered[0]
    weights = _weights(accept)

    def liked(media_type: str) -> tuple[float, int]:
        ranges = "*/*", f"{media_type.partition('/')[0]}/*", media_type
        named = max((at for at, each in enumerate(ranges) if each in weights), default=None)
        return (0.0, 0) if named is None else (weights[ranges[named]], named)

    return max(offered, key=liked)  # the first of the greatest


def takes_gzip(accept_encoding: str | None) -> bool:
    """Whether it takes a body in gzip, and would not rather have it plain."""
    weights = _weights(accept_encoding or "")
    gzip = weights.get("gzip", weights.get("*", 0.0))
    return gzip > 0 and gzip >= weights.get("identity", 0.0)


def _weights(header: str) -> dict[str, float]:
    """Weights by name, 1 where none can be read; of a name that comes twice the greater."""
    found: dict[str, float] = {}
    for part in header.split(","):
        name, *parameters = (each.strip().lower() for each in part.split(";"))
        weight = next((_weight(each[2:]) for each in parameters if each.startswith("q=")), 1.0)
        found[name] = max(weight, found.get(name, 0.0))
    return found


def _weight(text: str) -> float:
    try:
        return min(1.0, max(0.0, float(text)))
    except ValueError:
        return 1.0
