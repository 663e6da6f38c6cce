"""Where staleness is limited: a sample says its version, or is exempt and never too old."""

import pytest

from rollout_dispatcher.core.buffer.phases import StalenessPolicy
from rollout_dispatcher.sample import Outcome
from tests.support.core.cores import Bench
from tests.support.samples import make_sample

A, R = Outcome.ACCEPTED, Outcome.REFUSED


@pytest.mark.parametrize("policy", StalenessPolicy)
def test_a_sample_without_a_version_is_refused_where_staleness_is_limited(
    policy: StalenessPolicy,
) -> None:
    bench = Bench(max_staleness=1, staleness_policy=policy)
    pushed = [make_sample("a", policy_version=0), make_sample("b"), make_sample("c")]
    assert bench.push(*pushed) == (A, R, R)
    assert bench.errors()[0] == (
        "sample b has no policy_version, and --max-staleness is set: its age is not known; push it "
        "with the version of the weights that generated it, or, if none did (a demonstration, "
        "replay), with staleness_exempt=True"
    )
    assert bench.core.statistics().refused == {"policy-version-missing": 2}
    assert Bench().push(make_sample("b")) == (A,)  # where it is not limited
