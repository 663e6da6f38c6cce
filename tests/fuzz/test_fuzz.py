"""Anything may be sent: nothing crashes, grows, or harms others; and fuzzing finds what does."""

from pathlib import Path

import pytest

from tests.fuzz.campaign import (
    fuzz_about_stores,
    fuzz_as_ranks,
    fuzz_beside_work,
    fuzz_client_sessions,
    fuzz_session,
)
from tests.fuzz.http.attack import fuzz_http
from tests.fuzz.order.campaign import fuzz_order
from tests.fuzz.planted import IN_ORDER, IN_SERVICE, IN_SESSION, OVER_HTTP

SEED = 11


def test_no_bytes_confuse_the_session() -> None:
    fuzz_session(1500, SEED)


def test_no_bytes_confuse_the_sessions_of_clients() -> None:
    fuzz_client_sessions(600, SEED)


@pytest.mark.e2e
def test_nothing_that_is_sent_keeps_others_from_their_work(tmp_path: Path) -> None:
    found = fuzz_beside_work(tmp_path, 800, SEED)
    assert found["errors"], "no input was bad enough to be refused"


@pytest.mark.e2e
def test_nothing_that_is_said_of_payload_stores_keeps_others_from_their_work(
    tmp_path: Path,
) -> None:
    found = fuzz_about_stores(tmp_path, 200, SEED)
    assert found["referenced"], "no push of references was taken"
    assert found["released"], "nothing was released"


@pytest.mark.e2e
def test_nothing_that_ranks_say_costs_a_sample(tmp_path: Path) -> None:
    fuzz_as_ranks(tmp_path, 400, SEED)


@pytest.mark.e2e
def test_no_request_is_met_by_an_error_of_ours(tmp_path: Path) -> None:
    found = fuzz_http(tmp_path, 600, SEED)
    assert found["answers"].keys() >= {"200", "400", "422"}


@pytest.mark.e2e
@pytest.mark.parametrize("bug", OVER_HTTP)
def test_a_fault_that_requests_show_is_found(bug: str, tmp_path: Path) -> None:
    shows = {"trip-over-groups": "500", "keep-who-asked": "MiB more memory"}
    with pytest.raises(AssertionError, match=shows[bug]):
        fuzz_http(tmp_path, 600, SEED, bug)


def test_no_order_of_words_breaks_a_promise_between_generations() -> None:
    fuzz_order(100, SEED)


@pytest.mark.parametrize("bug", IN_ORDER)
def test_a_fault_in_the_order_of_words_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    IN_ORDER[bug](monkeypatch.setattr)
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever it may be, it shows
        fuzz_order(300, SEED)


@pytest.mark.parametrize("bug", IN_SESSION)
def test_a_fault_of_the_session_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    IN_SESSION[bug](monkeypatch.setattr)
    with pytest.raises(BaseException):  # noqa: B017, PT011 - whatever it may be, it shows
        fuzz_session(1500, SEED)


@pytest.mark.e2e
@pytest.mark.parametrize("bug", IN_SERVICE)
def test_a_fault_of_the_service_is_found(bug: str, tmp_path: Path) -> None:
    # A group: when hypothesis tries the input again, the fault may show in another way.
    with pytest.raises((AssertionError, OSError, EOFError, ExceptionGroup)):
        fuzz_beside_work(tmp_path, 500, SEED, bug)
