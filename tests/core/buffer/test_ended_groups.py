"""A group id names one group: late members are refused, and successors' do not join the dead's."""

import pytest

from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.sample import SIZE_AT_CLOSE, Outcome, Sample
from tests.support.core.cores import Bench
from tests.support.core.rules import all_entries
from tests.support.samples import make_sample

A, R, D = Outcome.ACCEPTED, Outcome.REFUSED, Outcome.DUPLICATE
INCOMPLETE, SUPERSEDED = DropReason.INCOMPLETE_GROUP, DropReason.SUPERSEDED


def of_group(*names: str, size: int = 4, group: str = "g") -> list[Sample]:
    return [make_sample(name, group_id=group, group_size=size) for name in names]


def buffered(bench: Bench) -> list[str]:
    return [entry.sample.sample_id for entry in all_entries(bench.core)]


# -- late members ------------------------------------------------------------------------------


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_a_member_after_group_timeout_is_refused_however_late(keep: bool, restart: bool) -> None:
    bench = Bench(group_timeout=5.0, producer_timeout=1.0, keep_incomplete=keep, durable=True)
    bench.push(*of_group("0", "1"))
    bench.perform(bench.core.producer_disconnected("p", bench.now))
    bench.pass_time(100)
    assert bench.dropped(INCOMPLETE) == (0 if keep else 2)
    if restart:
        bench.restart()
    for _ in range(3):  # as often as it is tried
        assert bench.push(*of_group("2", "3"), by="q") == (R, R)
    assert (
        "group g was given up: no member had come for 5 s (--set group-timeout), and none of its "
        "producers was there; a group_id names one group: what is generated for its prompt again, "
        "or in another epoch, is a group of another id, such as f'{prompt}@{epoch}'"
    ) in bench.errors()
    assert bench.core.statistics().open_groups == 0
    assert bench.push(*of_group("0", "1", "2", "3", group="g@1"), by="q") == (A, A, A, A)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("size", [1, 2, SIZE_AT_CLOSE])
@pytest.mark.parametrize("until", ["complete", "planned", "committed"])
def test_a_member_beyond_a_complete_group_is_refused(until: str, size: int, restart: bool) -> None:
    bench = Bench(batch=2, window=2, durable=True)
    bench.join()
    bench.push(*of_group(*"01"[: 1 if size == 1 else 2], size=size))
    bench.perform(bench.core.close_group("g", bench.now))
    bench.push_plain(2 if size == 1 else 1)
    if until != "complete":
        bench.hungry()
    if until == "committed":
        bench.train(0)
    if restart:
        bench.restart()
    assert bench.push(*of_group("2", size=size), by="q") == (R,)
    assert "group g is complete: all of its members have come; a group_id" in bench.errors()[-1]
    assert bench.core.statistics().open_groups == 0


def test_as_many_groups_are_remembered_as_ids() -> None:
    bench = Bench(id_horizon=2, capacity=20)
    for group in ("a", "b", "c"):
        assert bench.push(*of_group("0", "1", size=2, group=group)) == (A, A)
    assert bench.push(*of_group("2", group="b"), *of_group("2", group="c")) == (R, R)
    assert bench.push(*of_group("2", group="a")) == (A,)


def test_what_waits_for_room_is_refused_as_soon_as_its_group_is_complete() -> None:
    bench = Bench(batch=4, nbytes=4 * 32)
    bench.push(*of_group("0", "1"))
    large = make_sample("large", 16, group_id="g", group_size=4)
    assert bench.push(large, by="q") is None
    assert bench.push(*of_group("2", "3"), by="r") == (A, A)
    assert bench.core.statistics().pushes_held == 0
    assert "group g is complete" in bench.errors()[-1]


# -- who pushes a prompt again -------------------------------------------------------------------


def died(bench: Bench, producer: str) -> None:
    """Its connection is lost without a goodbye, and it does not come back in time."""
    bench.perform(bench.core.producer_disconnected(producer, bench.now))
    bench.pass_time(61)


@pytest.mark.parametrize("restart", [False, True])
def test_a_prompt_that_is_pushed_again_has_no_members_of_the_worker_that_died(
    restart: bool,
) -> None:
    bench = Bench(durable=True)
    bench.push(*of_group("old0", "old1"))
    if restart:
        bench.restart()
        bench.pass_time(61)
    else:
        died(bench, "p")
    for name in ("new0", "new1", "new2", "new3"):  # one by one
        assert bench.push(*of_group(name), by="q") == (A,)
    assert bench.dropped(SUPERSEDED) == 2
    assert buffered(bench) == ["new0", "new1", "new2", "new3"]
    assert bench.core.statistics().ready == 4
    assert bench.core.statistics().balanced
    bench.restart()
    assert buffered(bench) == ["new0", "new1", "new2", "new3"]


def test_a_whole_group_replaces_what_a_worker_left_that_is_not_there_at_the_moment() -> None:
    bench = Bench()
    bench.push(*of_group("old0", "old1"))
    bench.perform(bench.core.producer_disconnected("p", bench.now))  # restarted at once
    assert bench.push(*of_group("new0", "new1", "new2", "new3"), by="q") == (A, A, A, A)
    assert bench.dropped(SUPERSEDED) == 2
    assert buffered(bench) == ["new0", "new1", "new2", "new3"]


def test_another_process_of_the_same_name_is_a_successor_at_once() -> None:
    bench = Bench()
    bench.perform(bench.core.producer_connected("p", incarnation="p.1"))
    bench.push(*of_group("old0"))
    bench.perform(bench.core.producer_disconnected("p", bench.now))
    bench.perform(bench.core.producer_connected("p", incarnation="p.1"))
    bench.push(*of_group("old1"))
    bench.perform(bench.core.producer_disconnected("p", bench.now))
    bench.perform(bench.core.producer_connected("p", incarnation="p.2"))
    assert bench.push(*of_group("new0")) == (A,)
    assert (buffered(bench), bench.dropped(SUPERSEDED)) == (["new0"], 2)
    assert bench.push(*of_group("new1")) == (A,)
    assert bench.dropped(SUPERSEDED) == 2


def test_over_http_nobody_is_known_to_have_died() -> None:
    bench = Bench()
    bench.push(*of_group("0", "1"), by="")
    assert bench.push(*of_group("2", "3", "4"), by="q") == (A, A, R)
    assert (bench.core.statistics().ready, bench.dropped(SUPERSEDED)) == (4, 0)
