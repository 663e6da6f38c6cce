"""The first accepted push decides which fields samples have, unless they are declared."""

from rollout_dispatcher.core.buffer.buffer import DECLARED
from rollout_dispatcher.core.effects import PushAnswered, SchemaDecided
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.sample import DType, Field, Outcome, Sample, Schema
from tests.support.core.cores import Bench
from tests.support.samples import IDS, make_sample

FLOATS = Schema((Field("input_ids", DType.INT64), Field("logprobs", DType.FLOAT32)))


def real(name: str, **options: object) -> Sample:
    return make_sample(name, schema=FLOATS, **options)  # type: ignore[arg-type]


def decided(bench: Bench) -> list[SchemaDecided]:
    return [effect for effect in bench.log if isinstance(effect, SchemaDecided)]


def test_the_first_accepted_push_decides_and_others_are_refused_at_once() -> None:
    bench = Bench()
    assert bench.push(real("a"), by="actor-7") == (Outcome.ACCEPTED,)
    words = "set by the first accepted push, from producer actor-7"
    assert bench.core.schema == (FLOATS, words)
    assert decided(bench) == [SchemaDecided(FLOATS, words)]
    kinds = [type(effect) for effect in bench.log]
    assert kinds.index(SchemaDecided) < kinds.index(PushAnswered), (
        "before anybody is refused for it"
    )
    assert bench.push(make_sample("late")) == (Outcome.REFUSED,)
    (error,) = bench.errors()
    assert error.startswith(f"sample late differs from the run's samples ({words}): ")
    assert "logprobs is missing (float32[tokens]); push the same fields; if that push" in error
    assert bench.push(real("b")) == (Outcome.ACCEPTED,)
    assert len(decided(bench)) == 1


def test_a_push_that_is_refused_decides_nothing() -> None:
    bench = Bench()
    assert bench.push(real("long", tokens=9999)) == (Outcome.REFUSED,)
    assert bench.core.schema is None
    assert bench.push(make_sample("a"), by="") == (Outcome.ACCEPTED,)
    assert bench.core.schema == (IDS, "set by the first accepted push, from an HTTP client")


def test_of_a_push_of_two_kinds_the_first_accepted_sample_decides() -> None:
    bench = Bench()
    found = bench.push(make_sample("long", tokens=9999), real("a"), make_sample("b"), real("c"))
    assert found == (Outcome.REFUSED, Outcome.ACCEPTED, Outcome.REFUSED, Outcome.ACCEPTED)
    assert "logprobs is missing" in bench.errors()[1]


def test_a_push_held_before_anybody_has_decided_is_refused_when_it_is_its_turn() -> None:
    """Only a hard cap, here the journal's, holds a push back, and a smaller one passes it."""
    bench = Bench()
    bench.core.set_journal_capacity(lambda samples, nbytes: nbytes < 100)  # noqa: ARG005
    assert bench.push(real("large", tokens=50)) is None
    assert bench.push(make_sample("small"), by="") == (Outcome.ACCEPTED,)
    bench.core.set_journal_capacity(lambda samples, nbytes: True)  # noqa: ARG005
    bench.perform(bench.core.journal_takes_more(bench.now))
    assert "logprobs is unexpected" in bench.errors()[0]


def restarted(bench: Bench, **options: object) -> Bench:
    after = Bench(durable=True, **options)  # type: ignore[arg-type]
    after.memory = bench.memory  # the journal goes on
    after.perform(after.core.restore(bench.memory.remembered(), after.now))
    after.join()
    after.hungry()
    return after


def test_a_restart_with_declared_fields_drops_what_waited_with_others() -> None:
    bench = Bench(durable=True)
    bench.push(real("a"), real("b"))
    bench.push(real("g0", group_id="g", group_size=2))
    after = restarted(bench, schema=IDS)
    assert after.core.schema == (IDS, DECLARED)
    assert after.dropped(DropReason.SCHEMA) == 3
    assert after.core.statistics().balanced
    late = make_sample("g1", group_id="g", group_size=2)
    assert after.push(late, by="q") == (Outcome.REFUSED,)
    assert "group g was given up: its samples have other fields" in after.errors()[0]
    again = restarted(after)
    assert again.core.schema == (IDS, DECLARED)
    assert again.core.statistics().buffered == 0


def test_declared_fields_refuse_others_from_the_first_push_on() -> None:
    bench = Bench(schema=FLOATS)
    assert bench.push(make_sample("stray")) == (Outcome.REFUSED,)
    assert "(declared by --fields): logprobs is missing" in bench.errors()[0]
    assert "change --fields" in bench.errors()[0]
    assert bench.push(real("a"), real("b")) == (Outcome.ACCEPTED,) * 2
    assert decided(bench) == []
