"""Groups of a step by number, and their loss tokens over all ranks."""

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.steps.step import GroupTotals
from tests.support.samples import make_sample


def entry(name: str, loss_tokens: int, group: str | None = None) -> Entry:
    sample = make_sample(name)
    return Entry(sample._replace(loss_tokens=loss_tokens, group_id=group), 0, 0.0)


def test_a_group_has_one_number_wherever_its_members_are() -> None:
    a, b = entry("a", 2, "g"), entry("b", 3, "g")
    alone, other = entry("c", 5), entry("d", 0, "h")
    found = GroupTotals.of((((a, alone), ()), ((other,), (b,))))
    assert found == GroupTotals((((0, 1), ()), ((2,), (0,))), (5, 5, 0))


def test_a_sample_is_never_taken_for_a_member_of_a_group_of_its_name() -> None:
    found = GroupTotals.of((((entry("g", 1), entry("g", 1)), (entry("a", 1, "g"),)),))
    assert found is not None
    assert found.numbers == (((0, 1), (2,)),)


def test_without_groups_there_are_no_totals() -> None:
    assert GroupTotals.of((((entry("a", 1),),), ((),))) is None
