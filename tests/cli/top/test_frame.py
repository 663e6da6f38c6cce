"""What is shown of a run: what is lost, who is slow, what it waits for, in any size."""

import pytest

from rollout_dispatcher.cli.top.frame import Screen, frame, unanswered
from rollout_dispatcher.cli.top.history import History
from rollout_dispatcher.cli.top.view import Away, view
from rollout_dispatcher.cli.top.words import UNICODE
from tests.cli.top.readings import START, history_of, metrics, reading, staged, status

AWAY = Away("12:00:00", 83.0, "Connection refused")


def lines(history: History, width: int = 80, height: int | None = 24, **more: object) -> list[str]:
    screen = Screen(width, height, UNICODE, int(str(more.pop("offset", 0))))
    away = AWAY if more.pop("away", False) else None
    return [line.text for line in frame(view(history), "here", screen, away).lines]


def one(found: list[str], label: str) -> str:
    (line,) = [line for line in found if line.startswith(label)]
    return line


def two_looks(ranks: int = 4, *, slow: int = 2) -> History:
    """Ten seconds apart: 5 steps, in which one rank was slow."""
    speeds = {rank: 1.4 if rank == slow else 1.0 for rank in range(ranks)}
    first = reading(status(ranks), metrics(rank_slowness_ratio=speeds))
    after = metrics(
        10.0,
        rank_slowness_ratio=speeds,
        rank_compute_seconds_total=dict.fromkeys(range(ranks), 5.0),
        rank_straggler_wait_seconds_total={r: 0.0 if r == slow else 2.0 for r in range(ranks)},
        rank_wait_seconds_total=dict.fromkeys(range(ranks), 1.0),
        rank_last_seen_timestamp_seconds=dict.fromkeys(range(ranks), START + 107.0),
    )
    means = {"measured": (0.25, 0.3), "planned": (0.01, 0.02), "fifo": (0.4, 0.6)}
    steps = [
        staged(stage, excess=excess, imbalance=imbalance, steps=5)
        for stage, (excess, imbalance) in means.items()
    ]
    told = "\n".join([after, *steps])
    said = status(ranks, steps_committed=13, samples_committed=130, dispatched_tokens=18_000)
    return history_of(first, reading(said, told, 10.0))


def test_what_is_lost_comes_first_and_the_slow_rank_is_named() -> None:
    found = lines(two_looks())
    assert "20 % of the ranks' time, measured, over the last 5 steps" in one(found, "lost")
    assert "rank 2 takes 1.40 times as long as the median" in "\n".join(found)
    (row,) = [line for line in found if line.startswith("    2 ")]
    assert row.split() == ["2", "7", "50", "%", "0", "%", "10", "%", "1.40", "◀", "3", "s"]


def test_rates_are_those_between_looks() -> None:
    assert "0.50 steps/s   5 samples/s   1.00k tokens/s   over 10 s" in one(
        lines(two_looks()), "rate"
    )
    assert "- steps/s" in one(lines(history_of(reading(status(1), metrics()))), "rate")


def test_what_is_not_measured_says_why_and_shows_what_is_planned() -> None:
    why = "DP rank 1 cannot tell: gloo has no hook"
    said = status(2, measured={"why_not": why, "last_step": None})
    text = metrics() + "\n" + staged("planned", excess=0.01, imbalance=0.02, steps=5)
    found = lines(history_of(reading(said, text)))
    assert "0.99 % of the ranks' time, by the plans alone, over all 5 steps" in one(found, "lost")
    assert f"not measured: {why}" in "\n".join(found)


def test_why_nothing_is_planned_and_since_when() -> None:
    delays = [
        {"cause": "ranks", "text": "DP ranks 1, 3 have not joined", "seconds": 190.0},
        {"cause": "window", "text": "12 of 16 samples are ready", "seconds": 0.5},
    ]
    found = lines(history_of(reading(status(4, delays=delays), metrics())))
    text = "waits: DP ranks 1, 3 have not joined (3 min); 12 of 16 samples are ready"
    at = found.index(one(found, "next step"))
    assert " ".join(" ".join(found[at : at + 2]).split()) == f"next step {text}"
    assert "waits for nobody" in one(lines(two_looks()), "next step")


def test_ranks_that_are_not_there_are_named() -> None:
    said = status(4, ranks_connected=1, absent_ranks=[3])
    said["ranks"] = {
        "0": {"connected": True, "taken": 7},
        "1": {"connected": False, "taken": 7},
        "3": {"connected": False, "taken": -1},
    }
    found = lines(history_of(reading(said, metrics())))
    assert "1 of 4 connected, generation 1; not there: 2-3" in one(found, "ranks")
    states = [line.split()[1] for line in found if line[:5].strip().isdigit()]
    assert states == ["7", "left", "missing", "absent"]


def test_a_rank_that_hangs_is_marked() -> None:
    found = lines(history_of(reading(status(4, hung_ranks=[2]), metrics())))
    rows = {line.split()[0]: line.split()[1] for line in found if line[:5].strip().isdigit()}
    assert rows == {"0": "7", "1": "7", "2": "hangs", "3": "7"}


def test_caps_drops_and_backpressure_are_shown_where_they_are() -> None:
    said = status(
        1,
        config={"dispatch_batch_groups": 4, "buffer_tokens": 2400, "buffer_bytes": 96_000},
        dropped={"stale": 3, "oversize": 0},
        backpressure=True,
        pushes_held=2,
        open_groups=5,
    )
    found = lines(history_of(reading(said, metrics())))
    assert one(found, "ready").endswith("12 of window 16, cap 24".ljust(31))
    assert "┃" in one(found, "ready")
    assert "1.20k tokens of 2.40k" in one(found, "tokens")
    assert "9.38 KiB of 93.8 KiB" in one(found, "bytes")
    assert "5 groups lack members" in one(found, "held")
    assert "3 of 100 accepted samples: 3 stale" in one(found, "dropped")
    assert "2 connected, held back, 2 pushes wait for room" in one(found, "producers")


def test_what_lies_in_payload_stores_is_shown_where_there_are_any() -> None:
    config = {"dispatch_batch_groups": None, "buffer_tokens": None, "buffer_bytes": None}
    stores = config | {"payload_stores": ["file:///a"], "referenced_bytes": None}
    said = status(1, config=stores, buffered_referenced_bytes=2**30)
    found = lines(history_of(reading(said, metrics())))
    assert "9.38 KiB, 1.00 GiB in payload stores" in one(found, "held")
    said["config"] = stores | {"referenced_bytes": 2**32}
    assert "1.00 GiB of 4.00 GiB" in one(lines(history_of(reading(said, metrics()))), "stores")


@pytest.mark.parametrize("ranks", [1, 4, 512])
@pytest.mark.parametrize(
    ("width", "height"), [(80, 24), (160, 50), (100, 60), (40, 12), (200, 10), (20, 3)]
)
def test_a_frame_has_the_size_of_its_screen(width: int, height: int, ranks: int) -> None:
    found = lines(two_looks(ranks, slow=0), width, height, away=True)
    assert len(found) == height
    assert {len(line) for line in found} == {width}
    said = [line.text for line in unanswered("here", Screen(width, height, UNICODE), AWAY).lines]
    assert {len(line) for line in said} == {width}


def test_of_hundreds_of_ranks_the_worst_are_on_top_and_the_others_a_scroll_away() -> None:
    history = two_looks(512, slow=300)
    top = [line.split()[0] for line in lines(history) if line[:5].strip().isdigit()]
    assert top[:2] == ["300", "0"]
    assert "worst first, 1 to" in one(lines(history), "ranks")
    end = frame(view(history), "here", Screen(80, 24, UNICODE, 10**6))
    assert end.offset == 512 - len(top)
    assert [line.text.split()[0] for line in end.lines if line.text[:5].strip().isdigit()][-1] == (
        "511"
    )


def test_without_metrics_of_single_ranks_the_last_step_says_who_is_slow() -> None:
    told = [{"dp_rank": 0, "slowness": 1.0}, {"dp_rank": 1, "slowness": 1.4}]
    said = status(2, measured={"why_not": "", "last_step": {"ranks": told}})
    text = metrics() + "\n" + staged("measured", excess=0.2, imbalance=0.2, steps=3)
    assert "rank 1 takes 1.40" in "\n".join(lines(history_of(reading(said, text))))


def test_while_it_is_away_the_last_is_shown_and_since_when() -> None:
    found = lines(two_looks(), away=True)
    assert "no answer since 12:00:00 (83 s): Connection refused; asking again" in "\n".join(found)
    assert "no answer  up" in found[0]
    assert lines(two_looks(), 50, away=True)[0].endswith("  no answer ")
    assert "rank 2 takes 1.40" in "\n".join(found)


def test_another_process_begins_anew() -> None:
    history = two_looks()
    later = reading(status(4, steps_committed=1), metrics(start=START + 60.0), 20.0)
    history.add(later)
    assert len(history.readings) == 1
    assert not any(history.points.values())
    assert "before the first step" in one(lines(history), "lost")


def test_history_is_bounded_in_time() -> None:
    history = History()
    for at in range(100):
        history.add(reading(status(1, steps_committed=at), metrics(), float(at)))
    assert 30 <= history.seconds <= 31
    assert history.rate("steps_committed") == 1.0


def shares(history: History) -> list[float | None]:
    return [row.compute for row in view(history).rows]


def computed(at: float, each: float, *, ranks: int = 2) -> str:
    """An exposition in which every rank has computed for so long."""
    return metrics(at, rank_compute_seconds_total=dict.fromkeys(range(ranks), each))


def test_ranks_tell_once_a_step_however_long_that_takes() -> None:
    """Steps of 100 s, 90 of them computing, told when they are over; then a long pause."""
    history = History()
    for at in range(0, 1000, 10):
        done = 90.0 * (at // 100)
        history.add(reading(status(2), computed(at, done), float(at)))
        found = shares(history)
        if at < 100:
            assert found == [None, None], "nothing was told yet"
        elif at < 200:
            assert found == [0.9, 0.9], "since this began to look"
        else:
            assert found == [pytest.approx(0.9)] * 2
    assert len(history.told) == 2
    for at in range(1000, 2000, 10):
        history.add(reading(status(2), computed(at, 810.0), float(at)))
    assert max(filter(None, shares(history))) < 0.1, "it computes no more"


def test_a_step_that_is_over_just_after_the_first_look_says_nothing_yet() -> None:
    def of_a_second(each: float) -> list[float | None]:
        looks = ((0, 500.0), (1, 500.0 + each))
        return shares(history_of(*(reading(status(2), computed(*at), at[0]) for at in looks)))

    assert of_a_second(290.0) == [None, None]
    assert of_a_second(1.1) == [1.0, 1.0], "short ones, the first of which had begun before"


def test_what_a_rank_did_before_it_came_back_is_not_of_late() -> None:
    looks = [
        reading(status(2), computed(at, 1000.0 + at, ranks=ranks), float(at))
        for at, ranks in ((0, 2), (1, 1), (2, 1), (3, 2))
    ]
    assert shares(history_of(*looks)) == [1.0, None]


def test_where_there_is_little_room_ranks_come_before_curves() -> None:
    assert any("imbalance" in line for line in lines(two_looks()))
    found = lines(two_looks(), 80, 19)
    assert not any("imbalance" in line for line in found)
    assert sum(line[:5].strip().isdigit() for line in found) >= 3
