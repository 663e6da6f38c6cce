"""The sample buffer: caps, groups, and what may be chosen from."""

import pytest

from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.entry import NO_LIMITS, BufferLimits, MicroBatchLimits
from rollout_dispatcher.errors import SampleRefused
from rollout_dispatcher.sample import SIZE_AT_CLOSE, Sample
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
    group_size: int | None = None,
) -> SampleBuffer:
    limits = BufferLimits(
        samples, group, tokens, nbytes, max_sample_tokens,
        micro_batch=micro_batch, group_size=group_size,
    )  # fmt: skip
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


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_new_group_of_another_size_than_all_have_is_refused(size: int) -> None:
    buffer = make_buffer(group_size=4)
    words = rf"group g is of {size} samples, and --group-size is 4: push the group whole, or leave"
    with pytest.raises(SampleRefused, match=words) as caught:
        buffer.check_group(member("g0", "g", size))
    assert caught.value.reason == "group-size"
    buffer.check_group(member("g0", "g", 4))
    buffer.check_group(member("g0", "g", SIZE_AT_CLOSE))  # `close_group` brings it
    buffer.add(member("h0", "h", 3), "p", 0.0)  # of before a start with this option
    buffer.check_group(member("h1", "h", 3))


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
    with pytest.raises(SampleRefused, match="its first sample gave 2"):
        buffer.check_group(make_sample("g1", group_id="g", group_size=3))
