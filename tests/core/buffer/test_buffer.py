"""The sample buffer: caps, groups, and what may be chosen from."""

import pytest

from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.entry import NO_LIMITS, BufferLimits, MicroBatchLimits
from rollout_dispatcher.errors import SampleRefused
from rollout_dispatcher.sample import Sample
from tests.support.core.admissions import make_groups
from tests.support.samples import make_sample


def make_buffer(
    samples: int = 8,
    group: int = 8,
    tokens: int | None = None,
    nbytes: int = 10_000,
    max_sample_tokens: int = 100,
    *,
    groups_matter: bool = True,
    by_groups: bool = False,
    too_long: int | None = None,
    micro_batch: MicroBatchLimits = NO_LIMITS,
) -> SampleBuffer:
    limits = BufferLimits(
        samples, group, tokens, nbytes, max_sample_tokens, micro_batch=micro_batch
    )
    return SampleBuffer(
        limits,
        make_groups(),
        keep_groups_whole=groups_matter,
        by_groups=by_groups,
        too_long=too_long,
    )


def member(name: str, group_id: str, size: int, **options: object) -> Sample:
    return make_sample(name, group_id=group_id, group_size=size, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "sample"),
    [
        ("empty", make_sample(tokens=0)),
        ("too-long", make_sample(tokens=101)),
        ("loss-tokens", make_sample(tokens=4, loss_tokens=4)),
        ("larger-than-buffer", make_sample(tokens=99)),
    ],
)
def test_what_can_never_be_accepted_is_refused_with_its_reason(reason: str, sample: object) -> None:
    buffer = make_buffer(nbytes=700)
    with pytest.raises(SampleRefused) as caught:
        buffer.check(sample)  # type: ignore[arg-type]
    assert caught.value.reason == reason


def test_a_group_that_no_micro_batch_could_hold_is_refused_where_it_has_to_stay_in_one() -> None:
    by_count = make_buffer(micro_batch=MicroBatchLimits(samples=3))
    with pytest.raises(SampleRefused, match=r"a micro-batch takes at most 3.*--micro-batch-size"):
        by_count.check_group(member("g0", "g", 4))
    by_count.check_group(member("g0", "g", 3))
    by_tokens = make_buffer(micro_batch=MicroBatchLimits(tokens=16, length_multiple=4))
    by_tokens.add(make_sample("g0", 5, group_id="g", group_size=2), "p", 0.0)
    by_tokens.check_group(make_sample("g1", 8, group_id="g", group_size=2))
    with pytest.raises(SampleRefused, match=r"has 20 tokens with sample g1.*at most 16") as caught:
        by_tokens.check_group(make_sample("g1", 9, group_id="g", group_size=2))
    assert caught.value.reason == "group-too-long"


def test_a_member_that_contradicts_its_groups_size_is_refused() -> None:
    buffer = make_buffer()
    buffer.add(make_sample("g0", group_id="g", group_size=2), "p", 0.0)
    with pytest.raises(SampleRefused, match="its first sample said 2"):
        buffer.check_group(make_sample("g1", group_id="g", group_size=3))
