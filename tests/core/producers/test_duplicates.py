"""What is remembered of accepted samples, and how little."""

from rollout_dispatcher.core.admission import producers as duplicates
from rollout_dispatcher.core.admission.producers import DuplicateMemory


def test_numbers_below_the_floor_are_seen_without_being_remembered() -> None:
    memory = DuplicateMemory(horizon=10)
    for seq in range(100):
        memory.accept("p", range(seq, seq + 1), {})
        memory.raise_floor("p", seq)
    assert memory.seen("p", 0, None)
    assert memory.seen("p", 99, None)
    assert not memory.seen("p", 100, None)
    assert len(memory._producers["p"].accepted) == 1


def test_the_least_recently_active_producer_is_forgotten_first(monkeypatch: object) -> None:
    memory = DuplicateMemory(horizon=0)
    for number in range(duplicates.MAX_PRODUCERS + 1):
        memory.raise_floor(str(number), 5)
    assert not memory.seen("0", 1, None)
    assert memory.seen("1", 1, None)


def test_given_ids_are_remembered_across_producers_up_to_the_horizon() -> None:
    memory = DuplicateMemory(horizon=2)
    for seq, name in enumerate("abc"):
        memory.accept("p", range(seq, seq + 1), {name: 7})
    assert memory.seen("q", 0, "c")
    assert memory.seen("q", 0, "b")
    assert not memory.seen("q", 0, "a")
