"""Whom something holds for: as if all were asked each time, and only who has changed is."""

from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.core.steps.generation import Census

changes = st.lists(
    st.tuples(st.integers(0, 4), st.one_of(st.none(), st.integers(0, 3)), st.integers(0, 3))
)


@given(changes)
def test_it_finds_what_a_look_at_all_would(changes: list[tuple[int, int | None, int]]) -> None:
    things = dict[int, int]()
    census = Census(things)
    for number, value, least in changes:
        if value is None:
            things.pop(number, None)
        else:
            things[number] = value
        census.changed.add(number)
        expected = {number for number, value in things.items() if value >= least}
        assert census.find(least, least.__le__) == expected


def test_only_what_has_changed_is_asked_again() -> None:
    asked = list[int]()
    things = {number: number for number in range(9)}
    census = Census(things)

    def holds(value: int) -> bool:
        asked.append(value)
        return value > 4

    assert len(census.find("a", holds)) == 4
    census.changed.add(7)
    asked.clear()
    assert len(census.find("a", holds)) == 4
    assert asked == [7]
    assert len(census.find("b", holds)) == 4
    assert len(asked) == 10
