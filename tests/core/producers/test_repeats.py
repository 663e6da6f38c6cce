"""Samples under ids that were accepted before: duplicates, or conflicts."""

from rollout_dispatcher.core.admission.blocked_pushes import Push
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


def test_other_content_under_a_known_id_is_a_conflict_and_the_first_is_kept() -> None:
    bench = Named()
    assert bench.send(named("a"), named("b")) == [ACCEPTED] * 2
    assert bench.send(named("a", 8), named("b"), named("c")) == [CONFLICT, DUPLICATE, ACCEPTED]
    assert bench.send(named("d"), named("d", 8)) == [ACCEPTED, CONFLICT], "in one push too"
    at = bench.core.statistics()
    assert (at.received[CONFLICT], at.received[DUPLICATE], at.buffered) == (2, 1, 4)
    assert at.balanced


def test_checksums_outlive_the_process() -> None:
    bench = Named(durable=True)
    bench.send(named("a"))
    after = Named(durable=True)
    after.perform(after.core.restore(bench.memory.remembered(), after.now))
    assert after.send(named("a"), named("a", 8), by="q") == [DUPLICATE, CONFLICT]
