"""The lowest of numbers that change, beside a plain dictionary of them."""

from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.core.buffer.entry import SPARE, Lowest

changes = st.lists(
    st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(-3, 3), st.just("below")))
)


@given(changes)
def test_it_is_the_lowest_of_what_is_there(changes: list[tuple[int, int | str | None]]) -> None:
    found, plain = Lowest[int](), dict[int, int]()
    for thing, change in changes:
        if change is None:
            found.remove(thing)
            plain.pop(thing, None)
        elif isinstance(change, int):
            found.set(thing, change)
            plain[thing] = change
        else:
            below = sorted(number for number in plain.values() if number < thing)
            taken = found.take_below(thing)
            assert [plain.pop(name) for name in taken] == below
        assert found.lowest == min(plain.values(), default=None)
        assert len(found) == len(plain)
        assert all((name in found) == (name in plain) for name in range(6))


def test_what_is_left_behind_is_cleared_away() -> None:
    found = Lowest[str]()
    found.set("oldest", 0)
    for number in range(1, 10_000):
        found.set("restless", number)
    assert len(found._heap) <= 2 * len(found) + SPARE
