"""Samples under ids that were accepted before: which are reported, and how often."""

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.admission.eligibility import MANY
from rollout_dispatcher.core.effects import IdsRepeated
from rollout_dispatcher.sample import Outcome, Sample
from tests.support.core.cores import Bench
from tests.support.samples import make_sample

ACCEPTED, DUPLICATE, CONFLICT = Outcome.ACCEPTED, Outcome.DUPLICATE, Outcome.CONFLICT


def named(name: str, checksum: int | None = 7) -> Sample:
    return make_sample(name)._replace(checksum=checksum)


class Named(Bench):
    """Pushes samples whose ids were given, without room for many."""

    def send(self, *samples: Sample, by: str = "p", seq: int | None = None) -> list[Outcome]:
        first = self._next_seq if seq is None else seq
        self._next_seq = max(self._next_seq, first + len(samples))
        push = Push(by, first, samples, named=True)
        self.perform(self.core.push(push, self.now, may_wait=False))
        return [outcome for outcome in push.outcomes if outcome is not None]

    def reported(self) -> list[IdsRepeated]:
        return [effect for effect in self.log if isinstance(effect, IdsRepeated)]


def test_other_content_under_a_known_id_is_a_conflict_and_the_first_is_kept() -> None:
    bench = Named()
    assert bench.send(named("a"), named("b")) == [ACCEPTED] * 2
    assert bench.send(named("a", 8), named("b"), named("c")) == [CONFLICT, DUPLICATE, ACCEPTED]
    assert bench.send(named("d"), named("d", 8)) == [ACCEPTED, CONFLICT], "in one push too"
    at = bench.core.statistics()
    assert (at.received[CONFLICT], at.received[DUPLICATE], at.buffered) == (2, 1, 4)
    assert at.balanced
    assert bench.reported() == [IdsRepeated("p", "a", 1, conflicts=True)], "the first of them"


def test_many_duplicates_in_a_row_are_reported_once_and_an_accepted_sample_ends_the_row() -> None:
    bench = Named()
    bench.send(named("a"))
    for _ in range(MANY - 1):
        bench.send(named("a"))
    assert bench.reported() == []
    bench.send(named("b"))
    for _ in range(2 * MANY):
        bench.send(named("a"))
    assert bench.reported() == [IdsRepeated("p", "a", MANY, conflicts=False)]


def test_a_row_begins_anew_when_its_producer_connects_anew() -> None:
    bench = Named()
    bench.send(named("a"))
    for _ in range(2):
        bench.perform(bench.core.producer_connected("q"))
        for _ in range(MANY - 1):
            bench.send(named("a"), by="q")
        bench.perform(bench.core.producer_disconnected("q", bench.now))
    assert bench.reported() == []


def test_checksums_outlive_the_process() -> None:
    bench = Named(durable=True)
    bench.send(named("a"))
    after = Named(durable=True)
    after.perform(after.core.restore(bench.memory.remembered(), after.now))
    assert after.send(named("a"), named("a", 8), by="q") == [DUPLICATE, CONFLICT]
