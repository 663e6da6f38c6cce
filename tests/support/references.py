"""Pushes of samples of which some lie in a payload store, for tests that have no store."""

from collections.abc import Sequence

from rollout_dispatcher.protocol import messages as m
from tests.support.client import SCHEMA, make_push, make_span

STORE = "file:///mnt/rollouts"


def make_references(
    client_id: str,
    first_seq: int,
    tokens: Sequence[int],
    inline: Sequence[int] = (),
    **columns: object,
) -> tuple[m.Push, bytes]:
    """A push whose samples lie in one object, end to end, but for those at the `inline` places."""
    sizes = SCHEMA.sizes(tokens)
    places: list[tuple[int, int] | None] = []
    end = 0
    for at, size in enumerate(sizes):
        places.append(None if at in inline else (0, end))
        end += 0 if at in inline else size
    stored = m.ObjectHeader(store=STORE, key=f"{client_id}.1/{first_seq}", nbytes=end)
    placed: dict[str, object] = {"objects": [stored], "places": places}
    push, _ = make_push(client_id, first_seq, tokens, **placed | columns)
    return push, b"".join(make_span(first_seq + at, tokens[at]) for at in sorted(inline))
