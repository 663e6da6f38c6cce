"""The first step decides which fields samples have; what waits beside is dropped and counted."""

from rollout_dispatcher.core.buffer.lots import DECLARED
from rollout_dispatcher.core.dispatch import Dispatch
from rollout_dispatcher.core.effects import SchemaDecided
from rollout_dispatcher.core.facts import DropReason, SchemaFixed
from rollout_dispatcher.sample import DType, Field, Outcome, Sample, Schema
from tests.support.core.cores import Bench
from tests.support.samples import IDS, make_sample

FLOATS = Schema((Field("input_ids", DType.INT64), Field("logprobs", DType.FLOAT32)))


def real(name: str, **options: object) -> Sample:
    return make_sample(name, schema=FLOATS, **options)  # type: ignore[arg-type]


def push(bench: Bench, count: int, first: int = 0, by: str = "p") -> None:
    assert bench.push(*[real(f"{n}") for n in range(first, first + count)], by=by) == (
        Outcome.ACCEPTED,
    ) * count  # fmt: skip


def with_stray(**options: object) -> Bench:
    bench = Bench(**options)  # type: ignore[arg-type]
    bench.join()
    bench.hungry()
    assert bench.push(make_sample("stray"), by="") == (Outcome.ACCEPTED,)
    return bench


def test_a_stray_is_dropped_by_the_first_step_and_the_books_balance() -> None:
    bench = with_stray()
    push(bench, 6, by="actor")
    assert bench.trained(0) <= {str(number) for number in range(6)}
    assert bench.dropped(DropReason.SCHEMA) == 1
    assert bench.core.statistics().balanced
    (decided,) = [effect for effect in bench.log if isinstance(effect, SchemaDecided)]
    assert (decided.schema, decided.dropped[0].samples, decided.dropped[0].first) == (FLOATS, 1, "")
    assert "producer actor pushed first" in decided.set_by
    assert bench.push(make_sample("late")) == (Outcome.REFUSED,)
    assert "logprobs is missing" in bench.errors()[0]


def test_a_stray_group_goes_too_and_its_other_members_are_refused() -> None:
    bench = with_stray()
    bench.push(make_sample("g0", group_id="g", group_size=2), by="q")
    push(bench, 6)
    assert bench.dropped(DropReason.SCHEMA) == 2
    assert bench.core.statistics().open_groups == 0
    assert bench.push(real("g1", group_id="g", group_size=2)) == (Outcome.REFUSED,)
    assert "group g was given up: its samples have other fields" in bench.errors()[0]


def test_caps_do_not_stop_the_lot_that_would_win() -> None:
    """Four strays of two schemas each fill the cap of six; neither is a batch, so all may come."""
    other = Schema((Field("input_ids", DType.INT32),))
    bench = with_stray()
    bench.push(*[make_sample(f"s{n}") for n in range(2)], by="")
    bench.push(*[make_sample(f"o{n}", schema=other) for n in range(3)], by="")
    assert bench.core._buffer.soft_cap() is not None
    push(bench, 4)
    assert bench.trained(0) == {"0", "1", "2", "3"}
    assert bench.dropped(DropReason.SCHEMA) == 6


def test_at_the_end_of_the_stream_the_largest_lot_is_flushed() -> None:
    bench = with_stray()
    push(bench, 2)
    bench.perform(bench.core.end_stream(bench.now, force=True))
    assert bench.trained(0) == {"0", "1"}
    assert bench.dropped(DropReason.SCHEMA) == 1
    bench.train(0)
    assert bench.core.drained


def restarted(bench: Bench, **options: object) -> Bench:
    after = Bench(durable=True, **options)  # type: ignore[arg-type]
    after.memory = bench.memory  # the journal goes on
    after.perform(after.core.restore(bench.memory.remembered(), after.now))
    after.join()
    after.hungry()
    return after


def test_a_restart_before_the_first_step_leaves_it_open() -> None:
    bench = with_stray(durable=True)
    push(bench, 2)
    after = restarted(bench)
    assert after.core.schema is None
    push(after, 4, first=10, by="another")
    assert after.dropped(DropReason.SCHEMA) == 1
    assert after.core.statistics().balanced


def test_a_restart_after_it_goes_on_with_its_schema_though_nothing_is_held() -> None:
    bench = with_stray(durable=True)
    push(bench, 6)
    bench.perform(bench.core.end_stream(bench.now, force=True))
    bench.train(0)
    bench.train(1)
    after = restarted(bench)
    assert after.core.schema == bench.core.schema
    assert not any(isinstance(fact, SchemaFixed) for fact in after.facts), "it is known already"


def test_a_restart_with_declared_fields_drops_what_waited_with_others() -> None:
    bench = with_stray(durable=True)
    push(bench, 2)
    after = restarted(bench, schema=IDS)
    assert after.core.schema == (IDS, DECLARED)
    assert after.dropped(DropReason.SCHEMA) == 2
    assert after.core.statistics().balanced
    again = restarted(after)
    assert again.core.schema == (IDS, DECLARED)
    assert again.core.statistics().buffered == 1


def test_declared_fields_refuse_others_from_the_first_push_on() -> None:
    bench = Bench(schema=FLOATS)
    assert isinstance(bench.core, Dispatch)
    assert bench.push(make_sample("stray")) == (Outcome.REFUSED,)
    assert "declared by --fields" in bench.errors()[0]
    push(bench, 2)
