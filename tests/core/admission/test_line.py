"""Claims about the line of held pushes: in order for each producer, in turn between them."""

from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.core.admission.blocked_pushes import FairQueue


def take(line: FairQueue[str]) -> str:
    first = line.first()
    line.remove(first)
    return first


def drain(line: FairQueue[str]) -> list[str]:
    return [take(line) for _ in list(line)]


def test_who_comes_late_and_asks_for_little_does_not_stand_behind_a_backlog() -> None:
    line = FairQueue[str]()
    for at in range(8):
        for owner in "ab":
            line.add(f"{owner}{at}", owner, 512)
    assert [take(line), take(line), take(line)] == ["a0", "b0", "a1"]
    line.add("quiet", "q", 1)
    assert drain(line)[:3] == ["b1", "quiet", "a2"]


def test_shares_are_counted_in_units_not_in_pushes() -> None:
    line = FairQueue[str]()
    for at in range(4):
        line.add(f"large{at}", "a", 300)
    for at in range(6):
        line.add(f"small{at}", "b", 100)
    assert drain(line) == [
        "large0", "small0", "small1", "small2", "large1", "small3", "small4", "small5", "large2",
        "large3",
    ]  # fmt: skip


def test_who_was_taken_out_of_turn_keeps_nobody_else_waiting() -> None:
    line = FairQueue[str]()
    line.add("a0", "a", 5)
    line.add("a1", "a", 5)
    line.add("b0", "b", 5)
    line.remove("a1")
    assert list(line) == ["a0", "b0"]
    line.add("a2", "a", 5)
    assert drain(line) == ["a0", "b0", "a2"]


def test_what_was_given_up_is_not_held_against_who_comes_again_with_it() -> None:
    line = FairQueue[str]()
    for at in range(8):
        line.add(f"a{at}", "a", 512)
    for _ in range(5):
        line.add("b0", "b", 512)
        line.add("b1", "b", 512)
        line.withdraw("b0", "b", 512)
        line.withdraw("b1", "b", 512)
    line.add("b0", "b", 512)
    assert drain(line)[:3] == ["a0", "b0", "a1"]


def test_an_empty_line_remembers_nothing() -> None:
    line = FairQueue[str]()
    line.add("a0", "a", 1000)
    take(line)
    line.add("a1", "a", 1)
    line.add("b0", "b", 1)
    assert drain(line) == ["a1", "b0"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.booleans()), max_size=60))
def test_of_one_owner_first_come_is_first_served(
    story: list[tuple[str, int, bool]],
) -> None:
    line, waiting = FairQueue[str](), list[str]()
    for number, (owner, units, takes) in enumerate(story):
        line.add(f"{owner}{number}", owner, units)
        waiting.append(f"{owner}{number}")
        if takes:
            first = take(line)
            assert first == next(item for item in waiting if item[0] == first[0])
            waiting.remove(first)
    assert sorted(line) == sorted(waiting)
