"""What a refused client's user is told."""

import pytest

from rollout_dispatcher.errors import (
    ConfigError,
    DispatcherError,
    GenerationFenced,
    PlanError,
    ProtocolError,
    RankRefused,
)
from rollout_dispatcher.protocol import messages as m
from rollout_workers.client.link import refusal


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("fenced", GenerationFenced),
        ("rank-refused", RankRefused),
        ("config", ConfigError),
        ("too-long", PlanError),
        ("protocol", ProtocolError),
        ("a word of the future", ProtocolError),
    ],
)
def test_a_refusal_becomes_the_error_of_its_code(code: str, kind: type[DispatcherError]) -> None:
    error = refusal(m.Error(code=code, message="why"))
    assert (type(error), str(error)) == (kind, "why")


def test_a_retriable_refusal_is_a_lost_connection() -> None:
    assert isinstance(refusal(m.Error(code="x", message="y", retriable=True)), ConnectionError)
