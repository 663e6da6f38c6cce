"""The sample buffer: caps, groups, and what may be chosen from."""

import pytest

from dispatcher.core.buffer import SampleBuffer
from dispatcher.core.room import BufferLimits
from dispatcher.errors import SampleRefused
from dispatcher.sample import DType, Field, Schema
from tests.support.samples import make_sample


def make_buffer(
    samples: int = 8,
    group: int = 8,
    tokens: int | None = None,
    nbytes: int = 10_000,
    max_sample_tokens: int = 100,
    *,
    groups_matter: bool = True,
) -> SampleBuffer:
    limits = BufferLimits(samples, group, tokens, nbytes, max_sample_tokens)
    return SampleBuffer(limits, groups_matter=groups_matter)


def add(buffer: SampleBuffer, *names: str, now: float = 0.0) -> None:
    for name in names:
        buffer.add(make_sample(name), now)


def names(buffer: SampleBuffer, limit: int = 99) -> list[str]:
    return [entry.sample.sample_id for entry in buffer.ready(limit)]


def test_samples_without_a_group_are_ready_in_order_of_arrival() -> None:
    buffer = make_buffer()
    add(buffer, "a", "b", "c")
    assert names(buffer) == ["a", "b", "c"]
    assert names(buffer, 2) == ["a", "b"]


def test_taking_samples_frees_their_room() -> None:
    buffer = make_buffer(samples=2)
    add(buffer, "a", "b")
    full = buffer.full(make_sample("c"))
    assert full is not None
    assert (full.cap, full.held, full.capacity) == ("samples", 2, 2)
    buffer.take(buffer.ready(1))
    assert buffer.full(make_sample("c")) is None
    assert (len(buffer), buffer.held_tokens, buffer.held_bytes) == (1, 4, 32)


@pytest.mark.parametrize(("cap", "tokens", "nbytes"), [("tokens", 10, 10_000), ("bytes", None, 80)])
def test_tokens_and_bytes_are_capped_too(cap: str, tokens: int | None, nbytes: int) -> None:
    buffer = make_buffer(tokens=tokens, nbytes=nbytes)
    add(buffer, "a", "b")
    full = buffer.full(make_sample("c"))
    assert full is not None
    assert full.cap == cap


def test_a_group_is_ready_when_its_last_member_has_come() -> None:
    buffer = make_buffer()
    buffer.add(make_sample("g0", group_id="g", group_size=2), 0.0)
    add(buffer, "a")
    assert names(buffer) == ["a"]
    assert buffer.num_open_groups == 1
    buffer.add(make_sample("g1", group_id="g", group_size=2), 1.0)
    assert names(buffer) == ["a", "g0", "g1"]
    assert buffer.num_open_groups == 0


def test_members_of_a_group_share_a_number_that_no_other_group_has() -> None:
    buffer = make_buffer()
    for member in ("g0", "g1", "h0", "h1"):  # the id is used again once the group is complete
        buffer.add(make_sample(member, group_id="g", group_size=2), 0.0)
    first, second, third, fourth = (entry.group for entry in buffer.ready(9))
    assert first == second != third == fourth


def test_a_groups_first_member_reserves_room_for_all() -> None:
    buffer = make_buffer(samples=4)
    buffer.add(make_sample("g0", group_id="g", group_size=4), 0.0)
    assert buffer.full(make_sample("a")) is not None
    for member in ("g1", "g2", "g3"):
        sample = make_sample(member, group_id="g", group_size=4)
        assert buffer.full(sample) is None
        buffer.add(sample, 0.0)
    assert len(buffer) == 4


def test_a_group_that_finds_no_room_for_all_of_it_does_not_begin() -> None:
    buffer = make_buffer(samples=4)
    add(buffer, "a")
    assert buffer.full(make_sample("g0", group_id="g", group_size=4)) is not None


def test_the_window_never_cuts_a_group_in_two() -> None:
    buffer = make_buffer()
    add(buffer, "a", "b")
    for member in range(3):
        buffer.add(make_sample(f"g{member}", group_id="g", group_size=3), 0.0)
    assert names(buffer, 4) == ["a", "b"]
    assert names(buffer, 5) == ["a", "b", "g0", "g1", "g2"]


def test_dropping_an_open_group_gives_back_what_it_held_and_reserved() -> None:
    buffer = make_buffer(samples=4)
    buffer.add(make_sample("g0", group_id="g", group_size=3), 0.0)
    buffer.add(make_sample("g1", group_id="g", group_size=3), 0.0)
    assert [entry.sample.sample_id for entry in buffer.drop_group("g")] == ["g0", "g1"]
    assert buffer.drop_group("g") == []
    assert len(buffer) == buffer.held_bytes == buffer.held_tokens == 0
    assert buffer.full(make_sample("h", group_id="h", group_size=4)) is None


def test_dropping_a_stale_member_takes_the_whole_group() -> None:
    buffer = make_buffer()
    buffer.add(make_sample("g0", group_id="g", group_size=2, policy_version=1), 0.0)
    buffer.add(make_sample("g1", group_id="g", group_size=2, policy_version=2), 0.0)
    add(buffer, "a")
    dropped = buffer.drop_ready(lambda entry: entry.sample.policy_version == 1)
    assert [entry.sample.sample_id for entry in dropped] == ["g0", "g1"]
    assert names(buffer) == ["a"]


def test_with_groups_ignored_members_are_like_any_sample() -> None:
    buffer = make_buffer(groups_matter=False)
    buffer.add(make_sample("g0", group_id="g", group_size=64), 0.0)
    assert names(buffer) == ["g0"]
    assert buffer.ready(1)[0].group == -1


@pytest.mark.parametrize(
    ("reason", "sample"),
    [
        ("empty", make_sample(tokens=0)),
        ("too-long", make_sample(tokens=101)),
        ("loss-tokens", make_sample(tokens=4, loss_tokens=5)),
        ("group-too-large", make_sample(group_id="g", group_size=9)),
        ("group-size", make_sample(group_id="g", group_size=0)),
        ("larger-than-buffer", make_sample(tokens=99, group_id="g", group_size=8)),
    ],
)
def test_what_can_never_be_accepted_is_refused_with_its_reason(reason: str, sample: object) -> None:
    buffer = make_buffer(nbytes=4000)
    with pytest.raises(SampleRefused) as caught:
        buffer.check(sample)  # type: ignore[arg-type]
    assert caught.value.reason == reason


def test_a_member_that_contradicts_its_groups_size_is_refused() -> None:
    buffer = make_buffer()
    buffer.add(make_sample("g0", group_id="g", group_size=2), 0.0)
    with pytest.raises(SampleRefused, match="its first sample said 2"):
        buffer.check(make_sample("g1", group_id="g", group_size=3))


def test_a_schema_holds_while_samples_are_held() -> None:
    buffer = make_buffer()
    other = Schema((Field("input_ids", DType.INT32),))
    add(buffer, "a")
    with pytest.raises(SampleRefused, match="input_ids is int32"):
        buffer.check(make_sample("b", schema=other))
    buffer.take(buffer.ready(1))
    buffer.check(make_sample("b", schema=other))
