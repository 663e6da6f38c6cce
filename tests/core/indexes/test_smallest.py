"""Those that are small enough, as whoever looks at all of them would find them."""

from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.core.admission.held_pushes import Smallest

_sizes = st.none() | st.integers(0, 9)


@given(moves=st.lists(st.tuples(st.integers(0, 5), _sizes)), most=st.integers(-1, 9))
def test_what_fits_is_found_whatever_has_moved(
    moves: list[tuple[int, int | None]], most: int
) -> None:
    found: Smallest[str] = Smallest()
    sizes: dict[int, int | None] = {}
    for serial, size in moves:
        found.move(f"thing {serial}", serial, sizes.get(serial), size)
        sizes[serial] = size
    fitting = [(size, at) for at, size in sizes.items() if size is not None and size <= most]
    wanted = [f"thing {at}" for _, at in sorted(fitting)]
    assert list(found.fitting(lambda size: size <= most)) == wanted
