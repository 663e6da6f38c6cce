"""A rank's wait counts while it lasts, once, and never less than before."""

from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.service.metrics.collectors import RankWaits

RANKS = 2
EVENTS = st.tuples(
    st.sampled_from(["begins", "ends", "stops", "all_stop", "nothing"]),
    st.integers(0, RANKS - 1),
    st.floats(0, 100).map(lambda seconds: round(seconds, 3)),
)


def test_a_wait_that_lasts_counts_already() -> None:
    ended: list[float] = []
    waits = RankWaits(ended.append)
    waits.begins(0, 10.0)
    assert waits.seconds(2, 1090.0) == {0: 1080.0, 1: 0.0}
    waits.begins(0, 1090.0)  # said again: it is the same wait
    waits.ends(0, 1100.0)
    assert waits.seconds(2, 5000.0) == {0: 1090.0, 1: 0.0}
    assert ended == [1090.0]


def test_a_wait_that_a_lost_connection_cuts_short_counts_and_is_no_step() -> None:
    ended: list[float] = []
    waits = RankWaits(ended.append)
    waits.begins(1, 0.0)
    waits.stops(1, 5.0)
    assert waits.seconds(2, 9.0) == {0: 0.0, 1: 5.0}
    waits.begins(1, 9.0)  # it is back
    waits.ends(1, 10.0)
    assert waits.seconds(2, 10.0) == {0: 0.0, 1: 6.0}
    assert ended == [1.0]


@given(st.lists(EVENTS, max_size=30))
def test_the_seconds_of_a_rank_never_fall_and_are_what_its_waits_took(
    events: list[tuple[str, int, float]],
) -> None:
    waits, now = RankWaits(lambda _: None), 0.0
    waiting, expected = dict.fromkeys(range(RANKS), False), [0.0] * RANKS
    before: dict[int, float] = {}
    for what, rank, passes in events:
        now += passes
        for each in range(RANKS):
            expected[each] += passes if waiting[each] else 0.0
        if what == "all_stop":
            waits.all_stop(now)
            waiting = dict.fromkeys(waiting, False)
        elif what != "nothing":
            getattr(waits, what)(rank, now)
            waiting[rank] = what == "begins"
        found = dict(waits.seconds(RANKS, now))
        assert all(abs(found[each] - expected[each]) < 0.01 for each in range(RANKS))
        assert all(found[each] >= before.get(each, 0.0) for each in range(RANKS))
        before = found
