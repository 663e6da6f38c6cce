"""The view: text of the status, slow ranks, producers."""

import pytest

from rollout_dispatcher.cli.top import Reading, picture
from tests.cli.top.readings import WORDS, measured, reading, status


def one(found: list[str], label: str) -> str:
    (line,) = [line for line in found if line.startswith(label)]
    return line


def rows(found: list[str]) -> list[list[str]]:
    return [line.split() for line in found if line[:5].strip().isdigit()]


def two_readings(ranks: int = 4, *, slow: int = 2) -> tuple[Reading, Reading]:
    """Ten seconds apart: 5 steps, in which one rank was slow."""
    changed = status(
        ranks, steps_committed=13, samples_committed=130, dispatched_tokens=18_000,
        measured=measured(ranks, slow),
    )  # fmt: skip
    return reading(status(ranks)), reading(changed, 10.0)


def test_the_words_of_the_status_come_first_and_who_is_slow_is_marked() -> None:
    found = picture(two_readings(), "here")
    assert found[0] == "dispatcher top  here  1.2.3"
    assert found[1:6] == WORDS.splitlines()
    (row,) = [row for row in rows(found) if row[0] == "2"]
    assert " ".join(row) == "2 7 0.5 s 0.2 s 1.40 <"


def test_rates_are_those_between_readings() -> None:
    assert (
        one(picture(two_readings()), "rate") == "rate: 0.50 steps/s, 5.0 samples/s, 1,000 tokens/s"
    )
    assert one(picture([reading(status(1))]), "rate") == "rate: not known yet"


def test_producers_that_are_gone_are_shown_first_and_then_the_slowest() -> None:
    def client(name: str, rate: float, **more: object) -> dict[str, object]:
        about = {"client_id": name, "role": "producer", "host": "", "connected": True}
        return about | {"samples_per_second": rate, "last_error": ""} | more

    found = reading(status(1))._replace(
        clients=[
            client("fast", 9.0),
            client("slow", 1.0),
            client("rank", 0.0, role="rank"),
            client("dead", 3.0, connected=False, host="10.0.0.7", last_error="reset"),
            client("swift", 8.0),
        ]
    )
    shown = picture([found])
    told = [line for line in shown if line.startswith("producer ")]
    assert told == [
        "producer dead at 10.0.0.7: 3.0 samples/s, reset",
        "producer slow: 1.0 samples/s",
        "producer swift: 8.0 samples/s",
    ]
    assert "and 1 more producers: GET /v1/clients" in shown


def test_ranks_that_are_not_there_or_hang_are_named() -> None:
    changed = status(5, absent_ranks=[3], hung_ranks=[4])
    changed["ranks"] = {
        "0": {"connected": True, "taken": 7},
        "1": {"connected": False, "taken": 7},
        "3": {"connected": False, "taken": -1},
        "4": {"connected": True, "taken": 7},
    }
    found = rows(picture([reading(changed)]))
    assert [row[1] for row in found] == ["7", "left", "missing", "absent", "hangs"]


@pytest.mark.parametrize("height", [3, 12, 24, 50])
def test_where_not_all_ranks_fit_the_worst_are_shown(height: int) -> None:
    found = picture(two_readings(512, slow=300), height=height)
    assert len(found) == height
    if height >= 12:
        assert [row[0] for row in rows(found)][:2] == ["300", "0"]
        assert f"worst {len(rows(found))} of 512" in "\n".join(found)


def test_no_line_is_wider_than_the_terminal() -> None:
    found = picture(
        two_readings(), "here", "no answer since 12:00:00: " + "refused " * 20, width=50
    )
    assert max(map(len, found)) <= 50
    assert "".join(found).count("refused") == 20


def test_while_it_is_away_the_last_is_shown_and_why() -> None:
    found = picture(two_readings(), away="no answer since 12:00:00: refused; asking again")
    assert found[1] == "no answer since 12:00:00: refused; asking again"
    assert "11 % slow-rank" in "\n".join(found)
    assert picture([], away="no answer")[1] == "no answer"
