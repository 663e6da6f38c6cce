"""An error that is told to another process is the same there."""

import pytest

from rollout_dispatcher import errors
from rollout_dispatcher.errors import DispatcherError
from rollout_workers.client.link import restored, told

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, DispatcherError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_comes_back_with_its_class_and_text(kind: type[DispatcherError]) -> None:
    error = kind.__new__(kind, "what was found")
    Exception.__init__(error, "what was found")
    again = restored(told(error))
    assert type(again) is kind
    assert str(again) == "what was found"


def test_what_is_none_of_ours_goes_by_its_name() -> None:
    again = restored(told(OSError("no room")))
    assert type(again) is DispatcherError
    assert str(again) == "OSError: no room"


def test_a_code_that_is_not_known_is_an_error_all_the_same() -> None:
    message = told(DispatcherError("x")).model_copy(update={"code": "of a newer release"})
    assert type(restored(message)) is DispatcherError
