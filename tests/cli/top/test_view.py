"""What is shown of a run: what is lost, who is slow, what it waits for."""

import pytest

from rollout_dispatcher.cli.top_view import Reading, count, duration, lines, nbytes, percent
from tests.cli.top.readings import START, metrics, reading, staged, status


def shown(*readings: Reading, **more: int | str) -> list[str]:
    away, height = str(more.get("away", "")), int(more.get("height", 10**6))
    return [text for text, _ in lines(readings, "here", away, height)]


def one(found: list[str], label: str) -> str:
    (line,) = [line for line in found if line.startswith(label)]
    return line


def rows(found: list[str]) -> list[list[str]]:
    return [line.split() for line in found if line[:5].strip().isdigit()]


def two_looks(ranks: int = 4, *, slow: int = 2) -> tuple[Reading, Reading]:
    """Ten seconds apart: 5 steps, in which one rank was slow."""
    speeds = {rank: 1.4 if rank == slow else 1.0 for rank in range(ranks)}
    waited = dict.fromkeys(range(ranks), 2.0)
    before = metrics(rank_slowness_ratio=speeds, rank_wait_seconds_total=waited)
    first = reading(status(ranks), before)
    after = metrics(
        10.0,
        rank_slowness_ratio=speeds,
        rank_wait_seconds_total=dict.fromkeys(range(ranks), 3.0),
        rank_last_seen_timestamp_seconds=dict.fromkeys(range(ranks), START + 107.0),
    )
    means = {"measured": (0.25, 0.3), "planned": (0.01, 0.02), "fifo": (0.4, 0.6)}
    steps = [
        staged(stage, excess=excess, imbalance=imbalance, steps=5)
        for stage, (excess, imbalance) in means.items()
    ]
    step = [
        {"dp_rank": rank, "compute_s": 0.7 if rank == slow else 0.5, "wait_s": 0.2, "slowness": 1.0}
        for rank in range(ranks)
    ]
    measured = {"why_not": "", "last_step": {"ranks": step}}
    said = status(
        ranks, steps_committed=13, samples_committed=130, dispatched_tokens=18_000,
        measured=measured,
    )  # fmt: skip
    return first, reading(said, "\n".join([after, *steps]), 10.0)


def test_what_is_lost_comes_first_and_the_slow_rank_is_named() -> None:
    found = shown(*two_looks())
    assert "20 % of the ranks' time, measured, over the last 5 steps" in one(found, "lost")
    assert "rank 2 takes 1.40 times as long as the median" in "\n".join(found)
    (row,) = [row for row in rows(found) if row[0] == "2"]
    assert " ".join(row) == "2 7 0.7 s 0.2 s 10 % 1.40 < 3 s"
    assert "fifo 60 %   planned 2.0 %   measured 30 %" in one(found, "imbalance")


def test_rates_are_those_between_looks() -> None:
    told = "0.50 steps/s   5 samples/s   1.00k tokens/s   over 10 s"
    assert told in one(shown(*two_looks()), "rate")
    assert "- steps/s" in one(shown(reading(status(1), metrics())), "rate")


def test_what_is_not_measured_says_why_and_shows_what_is_planned() -> None:
    why = "DP rank 1 cannot tell: gloo has no hook"
    said = status(2, measured={"why_not": why, "last_step": None})
    text = metrics() + "\n" + staged("planned", excess=0.01, imbalance=0.02, steps=5)
    found = shown(reading(said, text))
    assert "0.99 % of the ranks' time, by the plans alone, over all 5 steps" in one(found, "lost")
    assert f"not measured: {why}" in "\n".join(found)


def test_why_nothing_is_planned_and_since_when() -> None:
    delays = [
        {"cause": "ranks", "text": "DP ranks 1, 3 have not joined", "seconds": 190.0},
        {"cause": "window", "text": "12 of 16 samples are ready", "seconds": 0.5},
    ]
    found = shown(reading(status(4, delays=delays), metrics()))
    at = found.index(one(found, "next step"))
    assert found[at].endswith("waits: DP ranks 1, 3 have not joined (3 min)")
    assert found[at + 1].endswith("waits: 12 of 16 samples are ready")
    assert "waits for nobody" in one(shown(*two_looks()), "next step")


def test_ranks_that_are_not_there_or_hang_are_named() -> None:
    said = status(5, ranks_connected=1, absent_ranks=[3], hung_ranks=[4])
    said["ranks"] = {
        "0": {"connected": True, "taken": 7},
        "1": {"connected": False, "taken": 7},
        "3": {"connected": False, "taken": -1},
        "4": {"connected": True, "taken": 7},
    }
    found = shown(reading(said, metrics()))
    assert "1 of 5 connected, generation 1; not there: 2, 3" in one(found, "ranks")
    assert [row[1] for row in rows(found)] == ["7", "left", "missing", "absent", "hangs"]


def test_caps_drops_and_backpressure_are_shown_where_they_are() -> None:
    said = status(
        1,
        config={"global_batch_groups": 4, "buffer_tokens": 2400, "buffer_bytes": 96_000},
        dropped={"stale": 3, "oversize": 0},
        backpressure=True,
        pushes_held=2,
        open_groups=5,
    )
    found = shown(reading(said, metrics()))
    assert one(found, "ready").endswith("12 of window 16, cap 24")
    assert "1.20k tokens of 2.40k, 9.38 KiB of 93.8 KiB" in one(found, "held")
    assert "5 groups lack members" in "\n".join(found)
    assert "3 of 100 accepted samples: 3 stale" in one(found, "dropped")
    assert "2 connected, held back, 2 pushes wait for room" in one(found, "producers")


def test_what_lies_in_payload_stores_is_shown_where_there_are_any() -> None:
    config = {"global_batch_groups": None, "buffer_tokens": None, "buffer_bytes": None}
    stores = config | {"payload_stores": ["file:///a"], "referenced_bytes": None}
    said = status(1, config=stores, buffered_referenced_bytes=2**30)
    assert "9.38 KiB, 1.00 GiB in payload stores" in one(shown(reading(said, metrics())), "held")
    said["config"] = stores | {"referenced_bytes": 2**32}
    assert "1.00 GiB of 4.00 GiB in payload" in one(shown(reading(said, metrics())), "held")


@pytest.mark.parametrize("height", [3, 12, 24, 50])
def test_where_not_all_ranks_fit_the_worst_are_shown(height: int) -> None:
    found = shown(*two_looks(512, slow=300), height=height)
    assert len(found) == height
    if height >= 24:
        assert [row[0] for row in rows(found)][:2] == ["300", "0"]
        assert "the worst " in one(found, "ranks")


def test_without_metrics_of_single_ranks_the_last_step_says_who_is_slow() -> None:
    told = [{"dp_rank": 0, "slowness": 1.0}, {"dp_rank": 1, "slowness": 1.4}]
    said = status(2, measured={"why_not": "", "last_step": {"ranks": told}})
    text = metrics() + "\n" + staged("measured", excess=0.2, imbalance=0.2, steps=3)
    assert "rank 1 takes 1.40" in "\n".join(shown(reading(said, text)))


def test_while_it_is_away_the_last_is_shown_and_why() -> None:
    found = shown(*two_looks(), away="no answer since 12:00:00: refused; asking again")
    assert "no answer since 12:00:00: refused; asking again" in found[1]
    assert "no answer  up" in found[0]
    assert "rank 2 takes 1.40" in "\n".join(found)
    assert shown(away="no answer")[1].split() == ["no", "answer"]


def test_numbers_are_short() -> None:
    assert list(map(count, (0, 0.5, 999, 1500, 21_300_000))) == [
        "0", "0.50", "999", "1.50k", "21.3M",
    ]  # fmt: skip
    assert list(map(nbytes, (12, 187_400, 2**31))) == ["12 B", "183 KiB", "2.00 GiB"]
    assert list(map(percent, (None, 0, 0.0013, 0.0123, 0.27))) == [
        "-", "0 %", "0.13 %", "1.2 %", "27 %",
    ]  # fmt: skip
    assert list(map(duration, (3.4, 119, 720, 18_720))) == ["3 s", "119 s", "12 min", "5.2 h"]
