"""Claims about the bench of a tuned number."""

import pytest

from rollout_planner import tuning
from tests.bench.cells import Cell
from tests.bench.constants import measure, set_to

CELL = Cell("short", 64, 8, 1.0, "lognormal", {"micro_batch_tokens": 65536})


def test_a_constant_has_a_value_for_as_long_as_it_is_measured() -> None:
    before = tuning.TOLERANCE
    with set_to("TOLERANCE", 0.0):
        assert tuning.TOLERANCE == 0.0
    assert before == tuning.TOLERANCE > 0


@pytest.mark.parametrize("name", ["NO_SUCH_CONSTANT", "np"])
def test_what_is_no_constant_is_not_set(name: str) -> None:
    with pytest.raises(SystemExit, match=f"{name} is no constant"), set_to(name, 1):
        pass


def test_what_a_constant_is_set_to_shows_in_plans() -> None:
    """Trades that look at no sample find nothing to trade."""
    with set_to("TRADED_FROM", 0):
        without, _ = measure(CELL, steps=3, seeds=1)
    assert measure(CELL, steps=3, seeds=1)[0] < without
