"""Lots: samples of different schemas are held apart, and one lot leads until a step decides."""

import pytest

from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.buffer.limits import BufferLimits
from rollout_dispatcher.core.buffer.lots import DECLARED, MAX_SCHEMAS
from rollout_dispatcher.core.buffer.open_groups import OpenGroups
from rollout_dispatcher.errors import SampleRefused
from rollout_dispatcher.sample import DType, Field, Schema
from tests.support.samples import IDS, make_sample

FLOATS = Schema((Field("input_ids", DType.INT64), Field("logprobs", DType.FLOAT32)))
OTHERS = [Schema((Field("input_ids", DType.INT64), Field(f"f{n}", DType.INT64))) for n in range(9)]


def make_buffer(batch: int = 3, cap: int = 99, *, by_groups: bool = False) -> SampleBuffer:
    limits = BufferLimits(cap, 8, None, 100_000, 100)
    return SampleBuffer(limits, OpenGroups(lambda _: True, 60.0), batch=batch, by_groups=by_groups)


def add(buffer: SampleBuffer, schema: Schema, *names: str, producer: str = "p") -> None:
    for name in names:
        sample = make_sample(name, schema=schema)
        buffer.check(sample)
        buffer.add(sample, producer, 0.0)


def names(buffer: SampleBuffer) -> list[str]:
    return [entry.sample.sample_id for entry in buffer.ready(99)]


def entries(buffer: SampleBuffer, schema: Schema) -> list[Entry]:
    return [entry for lot in buffer.lots if lot.schema == schema for entry in lot.ready.values()]


def test_a_plan_may_choose_from_the_largest_lot_alone() -> None:
    buffer = make_buffer()
    add(buffer, IDS, "stray")
    assert (names(buffer), buffer.ready_units) == (["stray"], 1)
    add(buffer, FLOATS, "a", "b")
    assert (names(buffer), buffer.ready_units, buffer.num_ready) == (["a", "b"], 2, 2)
    assert len(buffer) == 3


def test_the_first_lot_with_a_whole_batch_leads_from_then_on() -> None:
    buffer = make_buffer(batch=2)
    add(buffer, IDS, "a", "b")
    add(buffer, FLOATS, "c", "d", "e", "f")
    assert names(buffer) == ["a", "b"]
    buffer.take(entries(buffer, IDS)[:1])
    assert names(buffer) == ["c", "d", "e", "f"], "it has no whole batch any more"


def test_whoever_waited_is_tried_again_when_another_lot_leads() -> None:
    buffer = make_buffer()
    add(buffer, IDS, "a")
    add(buffer, FLOATS, "b")
    before = buffer.departures
    add(buffer, FLOATS, "c")
    assert buffer.departures > before


def test_caps_count_all_lots() -> None:
    buffer = make_buffer(cap=3)
    add(buffer, IDS, "a")
    add(buffer, FLOATS, "b", "c")
    full = buffer.soft_cap()
    assert full is not None
    assert full.held == 3


def test_lots_are_few_and_one_more_is_refused_in_words() -> None:
    buffer = make_buffer()
    for number, schema in enumerate(OTHERS[:MAX_SCHEMAS]):
        add(buffer, schema, f"{number}")
    with pytest.raises(SampleRefused, match=r"of 8 schemas already.*--fields") as caught:
        add(buffer, OTHERS[MAX_SCHEMAS], "one more")
    assert caught.value.reason == "schema"
    add(buffer, OTHERS[0], "one of those")


def test_a_lot_without_samples_makes_room_for_another() -> None:
    buffer = make_buffer()
    for number, schema in enumerate(OTHERS[:MAX_SCHEMAS]):
        add(buffer, schema, f"{number}")
    buffer.take(entries(buffer, OTHERS[3]))
    add(buffer, OTHERS[MAX_SCHEMAS], "one more")
    assert len(list(buffer.lots)) == MAX_SCHEMAS


def test_once_decided_others_are_refused_and_told_who_and_how() -> None:
    buffer = make_buffer()
    add(buffer, FLOATS, "a", producer="actor-7")
    buffer.lots.fix(FLOATS)
    buffer.take(buffer.ready(1))
    with pytest.raises(SampleRefused) as caught:
        add(buffer, IDS, "b")
    assert "producer actor-7 pushed first" in str(caught.value)
    assert "logprobs is missing (float32[tokens])" in str(caught.value)
    add(buffer, FLOATS, "c")
    assert names(buffer) == ["c"]


def test_a_declared_schema_needs_no_sample() -> None:
    buffer = make_buffer()
    buffer.lots.fix(IDS, DECLARED)
    with pytest.raises(SampleRefused, match=r"declared by --fields.*logprobs is unexpected"):
        add(buffer, FLOATS, "a")
    add(buffer, IDS, "b")
    buffer.take(entries(buffer, IDS))
    assert buffer.lots.fixed == IDS, "it stays when nothing is held"


def test_a_member_of_another_schema_than_its_group_is_refused() -> None:
    buffer = make_buffer(by_groups=True)
    buffer.add(make_sample("g0", group_id="g", group_size=3), "p", 0.0)
    with pytest.raises(SampleRefused, match="differs from the others of group g") as caught:
        buffer.check_group(make_sample("g1", schema=FLOATS, group_id="g", group_size=3))
    assert caught.value.reason == "schema"


def test_groups_count_as_units_of_their_lot_once_whole() -> None:
    buffer = make_buffer(by_groups=True)
    buffer.add(make_sample("a"), "p", 0.0)
    for name in ("g0", "g1"):
        assert buffer.ready_units == 1
        buffer.add(make_sample(name, schema=FLOATS, group_id="g", group_size=2), "p", 0.0)
    buffer.add(make_sample("h", schema=FLOATS), "p", 0.0)
    assert (buffer.ready_units, buffer.num_ready) == (2, 3)
    assert names(buffer) == ["g0", "g1", "h"]


def test_each_lot_knows_which_of_its_samples_are_old() -> None:
    """A phase that only a stray belongs to keeps no step from those that a plan may choose."""
    buffer = make_buffer()
    buffer.lots.watch_versions()
    buffer.add(make_sample("old", policy_version=1), "p", 0.0)
    for name in "ab":
        buffer.add(make_sample(name, schema=FLOATS, policy_version=2), "p", 0.0)
    assert not buffer.lots.leading.ages.has_before(2, 0)
    assert [len(lot.ages.older_than(2)) for lot in buffer.lots] == [1, 0]
