"""Which samples are too old: for the next step, for those after it, and for the next phase."""

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.buffer.phases import Freshness, NextStep, StalenessPolicy
from tests.support.core.cores import Bench
from tests.support.samples import make_sample


def test_samples_that_the_step_after_the_next_may_not_have_are_due_the_oldest_first() -> None:
    freshness, following = Freshness(1, StalenessPolicy.DROP), NextStep(0, -1)
    freshness.report(5, 0)
    assert freshness.oldest(following) == 4
    entries = [
        Entry(make_sample(f"{at}", policy_version=version), at, 0.0)
        for at, version in enumerate([5, 4, 6, 3])
    ]
    assert freshness.must_go(entries, following, 2).tolist() == [False, True, False, True]
    assert freshness.must_go(entries, following, 1).tolist() == [False, False, False, True]


def test_the_steps_of_a_phase_that_has_ended_have_no_sample_of_the_next_one() -> None:
    bench = Bench(batch=4, window=4, capacity=20)
    bench.push(*[make_sample(f"{at}", policy_version=at // 2) for at in range(4)])
    bench.perform(bench.core.end_phase(1, bench.now, "p"))
    bench.join()
    assert bench.trained(0) == {"0", "1"}
