"""What a producer that means no good can make the core remember has a bound."""

import pytest

from rollout_dispatcher.core.admission.admission import MAX_UNANSWERED
from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.admission.ends import MAX_ENDS
from rollout_dispatcher.core.admission.producers import MAX_NUMBERS, DuplicateMemory
from rollout_dispatcher.core.buffer.entry import SPARE
from rollout_dispatcher.core.buffer.open_groups import ClosedGroups, OpenGroups
from rollout_dispatcher.core.buffer.phases import MAX_PHASES
from rollout_dispatcher.errors import ProtocolError
from tests.support.core.cores import Bench
from tests.support.samples import make_sample


def test_numbers_far_above_their_floor_are_refused() -> None:
    bench = Bench()

    def push(first_seq: int, floor: int) -> None:
        samples = (make_sample(str(first_seq)),)
        bench.perform(bench.core.push(Push("p", first_seq, samples, floor), bench.now))

    push(MAX_UNANSWERED + 6, 7)
    accepted = bench.core.statistics().accepted
    with pytest.raises(ProtocolError, match="with a floor of 7"):
        push(MAX_UNANSWERED + 7, 7)
    assert bench.core.statistics().accepted == accepted == 1


def test_what_was_withdrawn_and_closed_long_ago_is_forgotten() -> None:
    memory = DuplicateMemory(horizon=0)
    known = memory._known("p")
    for number in range(0, 64 * MAX_NUMBERS, MAX_NUMBERS // 2):
        assert memory.refuse("p", number)
        assert memory.is_new_close("p", number)
        assert not memory.is_new_close("p", number)
    assert len(known.refused) <= 3
    assert len(known.closes) <= 3


def test_phases_that_are_asked_for_and_never_agreed_to_are_refused_at_last() -> None:
    bench = Bench()
    bench.push(make_sample("s", policy_version=0), by="never-done")
    for version in range(1, MAX_ENDS + 1):
        bench.perform(bench.core.end_phase(version, bench.now, "asks"))
    with pytest.raises(ProtocolError, match="wait for other producers"):
        bench.core.end_phase(MAX_ENDS + 1, bench.now, "asks")
    bench.perform(bench.core.end_phase(MAX_ENDS, bench.now, "asks"))  # repeated: nothing new


def test_phases_that_are_forced_while_nothing_is_trained_are_kept_apart_up_to_a_bound() -> None:
    bench = Bench(batch=4, window=4, capacity=4)
    bench.push(make_sample("s", policy_version=0), by="p")
    for version in range(1, MAX_PHASES + 10):
        bench.perform(bench.core.end_phase(version, bench.now, force=True))
    assert len(bench.core._parts.phases._ended) == MAX_PHASES
    bench.join()
    bench.hungry()
    assert bench.planned, "what is left of an ended phase goes, however small the step is"


def test_groups_that_come_and_go_leave_nothing_behind() -> None:
    groups = OpenGroups(lambda _: False, 600.0, ClosedGroups(100, print))
    stays = groups.open("stays", 2, 0.0)
    for number in range(10 * SPARE):
        groups.remove(groups.open(str(number), 2, 1.0), None)
    assert len(groups._deserted._heap) <= SPARE + 4
    assert groups.overdue(600.0) == [stays]
