"""Who is there, and who went: each client once, and a bounded number of those that are gone."""

import pytest

from rollout_dispatcher.service.connections.clients import MAX_GONE, RATE_SECONDS, Clients


def test_a_client_that_comes_back_is_the_same_one_with_its_last_error() -> None:
    clients, first, second = Clients(), object(), object()
    clients.joined("p", "producer", "10.0.0.7", first)
    clients.answered("p", 4, "", 0.0)
    gone = clients.lost("p", first, "reset")
    assert gone is not None
    assert (gone.client_id, gone.host, gone.accepted) == ("p", "10.0.0.7", 4)
    clients.joined("p", "producer", "10.0.0.8", second)
    assert clients.lost("p", first, "reset") is None, "of the connection before"
    (told,) = clients.as_json(0.0)
    assert (told["host"], told["connected"]) == ("10.0.0.8", True)
    assert told["last_error"] == "connection lost: reset"
    assert told["samples_accepted"] == 4


def test_who_says_goodbye_is_forgotten_and_of_others_the_last_are_known() -> None:
    clients, connection = Clients(), object()
    clients.joined("polite", "producer", "", connection)
    assert clients.lost("polite", connection, "bye") is None
    for number in range(MAX_GONE + 1):
        clients.joined(f"p{number}", "producer", "", connection)
        clients.lost(f"p{number}", connection, "eof")
    found = [each["client_id"] for each in clients.as_json(0.0)]
    assert found == [f"p{number}" for number in range(1, MAX_GONE + 1)]


def test_a_rate_is_of_late() -> None:
    clients = Clients()
    clients.joined("p", "producer", "", None)
    for second in range(300):
        clients.answered("p", 10, "", float(second))
    (told,) = clients.as_json(299.0)
    assert told["samples_per_second"] == pytest.approx(10, rel=0.05)
    (told,) = clients.as_json(299.0 + 3 * RATE_SECONDS)
    assert told["samples_per_second"] < 1


def test_a_refused_sample_is_the_last_error() -> None:
    clients = Clients()
    clients.joined("p", "producer", "", object())
    clients.answered("p", 0, "too long", 0.0)
    clients.answered("p", 3, "", 0.0)
    assert clients.as_json(0.0)[0]["last_error"] == "too long"


def test_producers_over_http_are_one_client_a_host_and_there_while_they_push() -> None:
    clients = Clients()
    clients.pushed_over_http("10.0.0.7", 4, "", 0.0)
    clients.pushed_over_http("10.0.0.7", 2, "no field input_ids", 1.0)
    (told,) = clients.as_json(1.0)
    assert (told["client_id"], told["host"]) == ("http 10.0.0.7", "10.0.0.7")
    assert (told["connected"], told["samples_accepted"]) == (True, 6)
    assert told["last_error"] == "no field input_ids"
    (told,) = clients.as_json(2.0 + RATE_SECONDS)
    assert not told["connected"]
    for number in range(MAX_GONE):
        clients.pushed_over_http(f"h{number}", 1, "", 2.0)
    assert [each["host"] for each in clients.as_json(2.0)] == [f"h{n}" for n in range(MAX_GONE)]
