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


def add(buffer: SampleBuffer, *names: str, now: float = 0.0) -> None:
    for name in names:
        buffer.add(make_sample(name), "p", now)


def names(buffer: SampleBuffer, limit: int = 99) -> list[str]:
    return [entry.sample.sample_id for entry in buffer.ready(limit)]


def test_members_of_a_group_share_a_number_that_no_other_group_has() -> None:
    buffer = make_buffer()
    for member in ("g0", "g1", "h0", "h1"):  # the id is used again once the group is complete
        buffer.add(make_sample(member, group_id="g", group_size=2), "p", 0.0)
    first, second, third, fourth = (entry.group for entry in buffer.ready(9))
    assert first == second != third == fourth


def test_counted_by_groups_a_group_is_one_and_so_is_a_sample_without_one() -> None:
    buffer = make_buffer(samples=3, by_groups=True)
    for at in range(5):
        buffer.add(member(f"g{at}", "g", 5), "p", 0.0)
    add(buffer, "a")
    for at in range(3):
        buffer.add(member(f"h{at}", "h", 3), "p", 0.0)
    assert buffer.ready_units == 3
    full = buffer.soft_cap()
    assert full is not None
    assert full.cap == "groups"
    assert names(buffer, 1) == ["g0", "g1", "g2", "g3", "g4"]
    assert names(buffer, 2) == ["g0", "g1", "g2", "g3", "g4", "a"]
    assert buffer.units_of(buffer.ready(3)) == 3
    buffer.remove(buffer.ready(2))
    assert buffer.ready_units == 1


def test_members_of_a_complete_group_are_judged_by_its_oldest_version() -> None:
    buffer = make_buffer()
    for at, version in enumerate((4, None, 2)):
        buffer.add(member(f"g{at}", "g", 3, policy_version=version), "p", 0.0)
    assert {entry.version for entry in buffer.ready(9)} == {2}


def test_payloads_that_the_journal_has_leave_memory_and_are_not_counted_again() -> None:
    buffer = make_buffer()
    entries = [buffer.add(member(f"g{at}", "g", 3), "p", 0.0) for at in range(2)]
    add(buffer, "a")
    buffer.drop_payloads(entries)
    assert buffer.held.nbytes == 32
    assert not any(entry.sample.is_in_memory for entry in entries)
    buffer.add(member("g2", "g", 3), "p", 0.0)
    buffer.remove(buffer.ready(9))
    assert len(buffer) == buffer.held.nbytes == buffer.held.tokens == 0
    buffer.drop_payloads(entries)  # they have left meanwhile
    assert buffer.held.nbytes == 0


def test_a_group_is_as_old_as_its_oldest_member() -> None:
    buffer = make_buffer()
    add(buffer, "before")
    buffer.watch_versions()
    buffer.add(make_sample("new", policy_version=2), "p", 0.0)
    buffer.add(make_sample("g0", group_id="g", group_size=2, policy_version=1), "p", 0.0)
    buffer.add(make_sample("old", policy_version=0), "p", 0.0)
    buffer.add(make_sample("g1", group_id="g", group_size=2, policy_version=2), "p", 0.0)
    older = [buffer.drop_index.older_than(version) for version in (0, 1, 2, 2)]
    assert [[entry.sample.sample_id for entry in found] for found in older] == [
        [], ["old"], ["old", "g0", "g1"], ["old", "g0", "g1"],
    ]  # fmt: skip
    buffer.remove(older[-1])
    assert buffer.drop_index.older_than(9) == [buffer.ready(9)[1]]
    assert (
        buffer.drop_index.has_before(2, 0),
        buffer.drop_index.has_before(2, 1),
    ) == (False, True)


def test_a_group_is_as_long_as_its_longest_member() -> None:
    buffer = make_buffer(too_long=10)
    for name, tokens in (("g0", 4), ("g1", 11)):
        buffer.add(make_sample(name, tokens, group_id="g", group_size=2), "p", 0.0)
    buffer.add(make_sample("h", 10), "p", 0.0)
    buffer.add(make_sample("i", 11), "p", 0.0)
    too_long = buffer.drop_index.too_long()
    assert [entry.sample.sample_id for entry in too_long] == ["g0", "g1", "i"]
    buffer.remove(too_long)
    assert (buffer.drop_index.too_long(), names(buffer)) == ([], ["h"])


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
