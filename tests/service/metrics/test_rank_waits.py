"""A wait that ended in a step is observed, once, and no other."""

from rollout_dispatcher.service.metrics.collectors import RankWaits


def test_a_wait_is_observed_once_it_has_ended() -> None:
    ended: list[float] = []
    waits = RankWaits(ended.append)
    waits.begins(0, 10.0)
    waits.begins(0, 1090.0)  # said again: it is the same wait
    assert waits.is_waiting(0)
    assert waits.ends(0, 1100.0) == 1090.0
    assert waits.ends(0, 1200.0) is None
    assert ended == [1090.0]


def test_a_wait_that_ends_without_a_step_is_not_observed() -> None:
    ended: list[float] = []
    waits = RankWaits(ended.append)
    for rank in (0, 1):
        waits.begins(rank, 0.0)
    waits.stops(1)
    waits.all_stop()
    waits.begins(1, 9.0)  # it is back
    waits.ends(1, 10.0)
    assert ended == [1.0]
