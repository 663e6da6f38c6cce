"""What is remembered of accepted samples, and how little."""

from rollout_dispatcher.core.admission import producers as duplicates
from rollout_dispatcher.core.admission.producers import DuplicateMemory


def test_an_accepted_number_is_seen_again_and_another_is_not() -> None:
    memory = DuplicateMemory(horizon=10)
    memory.accept("p", range(3, 4), {})
    assert memory.seen("p", 3, None)
    assert not memory.seen("p", 4, None)
    assert not memory.seen("q", 3, None)


def test_numbers_below_the_floor_are_seen_without_being_remembered() -> None:
    memory = DuplicateMemory(horizon=10)
    for seq in range(100):
        memory.accept("p", range(seq, seq + 1), {})
        memory.raise_floor("p", seq)
    assert memory.seen("p", 0, None)
    assert memory.seen("p", 99, None)
    assert not memory.seen("p", 100, None)
    assert len(memory._producers["p"].accepted) == 1


def test_given_ids_are_remembered_across_producers_up_to_the_horizon() -> None:
    memory = DuplicateMemory(horizon=2)
    for seq, name in enumerate("abc"):
        memory.accept("p", range(seq, seq + 1), {name: 7})
    assert memory.seen("q", 0, "c")
    assert memory.seen("q", 0, "b")
    assert not memory.seen("q", 0, "a")


def test_samples_are_new_if_none_of_their_numbers_and_ids_was_accepted() -> None:
    memory = DuplicateMemory(horizon=10)
    memory.raise_floor("p", 2)
    memory.accept("p", range(4, 6), {"a": None, "b": 7})
    assert memory.are_new("p", range(2, 4), ["c", "d"])
    assert memory.are_new("p", range(6, 9), [])
    assert not memory.are_new("p", range(1, 3), [])
    assert not memory.are_new("p", range(3, 5), [])
    assert not memory.are_new("q", range(2), ["c", "a"])
    assert not memory.are_new("q", range(2), ["c", "c"])


def test_the_same_id_with_other_content_is_a_conflict_as_far_as_both_are_known() -> None:
    memory = DuplicateMemory(horizon=10)
    memory.accept("p", range(2), {"a": 7, "b": None})
    assert memory.conflicts("a", 8)
    assert not memory.conflicts("a", 7)
    assert not memory.conflicts("a", None)
    assert not memory.conflicts("b", 8)
    assert not memory.conflicts("c", 8)


def test_a_horizon_of_zero_remembers_no_ids() -> None:
    memory = DuplicateMemory(horizon=0)
    memory.accept("p", range(1), {"a": None})
    assert not memory.seen("q", 0, "a")


def test_a_push_without_a_producer_is_never_a_repeat_of_another_not_even_after_a_restart() -> None:
    memory = DuplicateMemory(horizon=10)
    memory.accept("", range(1), {})
    memory.restore({"": (0, frozenset({0})), "p": (3, frozenset({4}))}, [("a", 7)], {})
    assert not memory.seen("", 0, None)
    assert memory.seen("p", 2, None)
    assert memory.seen("p", 4, None)
    assert not memory.seen("p", 3, None)
    assert memory.seen("", 0, "a")


def test_the_least_recently_active_producer_is_forgotten_first(monkeypatch: object) -> None:
    memory = DuplicateMemory(horizon=0)
    for number in range(duplicates.MAX_PRODUCERS + 1):
        memory.raise_floor(str(number), 5)
    assert not memory.seen("0", 1, None)
    assert memory.seen("1", 1, None)
