"""Fields become one span that the schema describes, or an error that names the field."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import SampleRefused
from rollout_dispatcher.protocol.outbox import JOINED_BYTES
from rollout_dispatcher.sample import DType
from rollout_workers.producer.encode import EncodedSample, Encoder, RolloutSample
from rollout_workers.producer.pushes import header, payload

FLOATS = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)


def encode(per_sample: tuple[str, ...] = (), **fields: Any) -> EncodedSample:
    return Encoder(per_sample).encode([RolloutSample({"input_ids": [5, 6, 7], **fields})])[0]


def encode_only(**fields: Any) -> EncodedSample:
    return Encoder().encode([RolloutSample(fields)])[0]


def span(*samples: EncodedSample) -> bytes:
    return b"".join(payload(samples))


def values(encoded: EncodedSample, name: str) -> bytes:
    """The bytes of one field, found through the schema alone."""
    place = encoded.schema.slices(encoded.tokens)[encoded.schema.names.index(name)]
    return span(encoded)[place]


def dtype_of(encoded: EncodedSample, name: str) -> DType:
    return encoded.schema.fields[encoded.schema.names.index(name)].dtype


def test_lists_arrays_and_tensors_make_the_same_span() -> None:
    spans = {
        span(encode_only(input_ids=ids, logprobs=floats))
        for ids, floats in [
            ([1, 2], [0.5, -1.0]),
            (np.array([1, 2]), np.array([0.5, -1.0], np.float32)),
            (torch.tensor([1, 2]), torch.tensor([0.5, -1.0])),
        ]
    }
    assert len(spans) == 1


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype is not DType.STR])
def test_every_tensor_type_keeps_its_bits(dtype: DType) -> None:
    tensor = torch.tensor([0, 1, 1]).to(getattr(torch, dtype))
    encoded = encode(x=tensor)
    assert dtype_of(encoded, "x") is dtype
    assert values(encoded, "x") == bytes(tensor.view(torch.uint8).numpy())


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        (
            torch.arange(6.0).reshape(2, 3).requires_grad_().t(),
            np.array([0, 3, 1, 4, 2, 5], np.float32),
        ),
        (np.array([1, 2, 3], ">i4"), np.array([1, 2, 3], np.int32)),
        (np.frombuffer(bytes(range(32)), np.uint8)[3:-5].view(np.int64), None),  # at any address
    ],
)
def test_values_are_sent_however_they_lie_in_memory(value: Any, sent: Any) -> None:
    expected = value if sent is None else sent
    assert values(encode(x=value), "x") == expected.tobytes()


def test_a_scalar_or_a_named_field_is_per_sample_and_others_are_per_token() -> None:
    encoded = encode(("grid",), reward=1.0, grid=[1, 2], logits=np.zeros((3, 4), np.float16))
    found = {item.name: (item.per_token, item.shape) for item in encoded.schema.fields}
    assert found["reward"] == (False, ())
    assert found["grid"] == (False, (2,))
    assert found["logits"] == (True, (4,))
    assert found["input_ids"] == (True, ())


def test_loss_tokens_are_those_of_the_mask_or_all_but_the_first_that_never_counts() -> None:
    assert encode().loss_tokens == 2
    assert encode_only(input_ids=[5]).loss_tokens == 0
    assert encode_only(input_ids=[5], loss_mask=[1]).loss_tokens == 0
    assert encode(loss_mask=[1, 1, 1]).loss_tokens == 2
    assert encode(loss_mask=[0, 1, 1]).loss_tokens == 2
    assert encode(loss_mask=torch.tensor([0, 1, 0], dtype=torch.bfloat16)).loss_tokens == 1


def test_a_mask_that_marks_first_tokens_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    encoder, sample = Encoder(), RolloutSample({"input_ids": [5, 6], "loss_mask": [1, 1]})
    batch = encoder.encode([sample] * 3)
    (record,) = caplog.records
    assert "make the producer with loss_mask_shifted=True" in record.message
    assert header(batch, "p", 0).left_out == 3


@pytest.mark.parametrize(
    ("mask", "sent", "counted", "left_out"),
    [
        ([0, 1, 1, 0], [0, 0, 1, 1], 2, 0),
        ([1, 1, 1, 1], [1, 1, 1, 1], 3, 1),
        (torch.tensor([0, 0, 1, 1], dtype=torch.bfloat16), [0x3F80, 0, 0, 0x3F80], 1, 1),
    ],
)
def test_a_shifted_mask_is_sent_as_any_other(
    mask: Any, sent: list[int], counted: int, left_out: int, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = Encoder(loss_mask_shifted=True)
    for _ in range(2):  # the second is recognised by the first
        found = encoder.encode([RolloutSample({"input_ids": [5, 6, 7, 8], "loss_mask": mask})])[0]
        ids, moved = found.arrays
        assert (ids.tolist(), moved.tolist()) == ([5, 6, 7, 8], sent)
        assert (found.loss_tokens, found.left_out) == (counted, left_out)
    assert encoder.encode([RolloutSample({"input_ids": [5, 6]})])[0].loss_tokens == 1
    assert not caplog.records


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"input_ids": []}, "no tokens"),
        ({"input_ids": [[1, 2]]}, "must be integers"),
        ({"input_ids": [0.5]}, "floats never become integers"),
        ({"input_ids": np.array([0.5])}, "must be integers"),
        ({"input_ids": torch.zeros(3, dtype=torch.bfloat16)}, "must be integers"),
        ({"reward": [1.0, 2.0]}, "reward has 2 rows for 3 tokens.*per_sample"),
        ({"x": np.zeros((3, 0))}, r"x has values of the shape \[0\]"),
        ({"x": [[1], [2, 3], []]}, "x is no array"),
        ({"x": np.array([1, 2, 3], np.uint32)}, "x is uint32; accepted are bool"),
        ({"x": torch.zeros(3, dtype=torch.complex64)}, "x is complex64"),
        ({"x": np.array([object()] * 3)}, "x is object"),
        ({"x": ["a", "b", "c"]}, "x holds strings; text is one str a sample"),
        ({"loss_mask": [0.5, 1, 1]}, r"loss_mask\[0\] is 0.5"),
        ({"loss_mask": np.array([0.5, 1, 1])}, "zeros and ones"),
        ({"loss_mask": 1}, "one a token"),
        ({"cu_seqlens": [1, 2, 3]}, "may not be called 'cu_seqlens'"),
        ({"policy_version": 3}, "policy_version is no field.*RolloutSample"),
        ({"group_id": 3}, "group_id is no field"),
    ],
)
def test_a_bad_field_is_refused_by_name(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SampleRefused, match=complaint):
        encode(**fields)


def test_a_sample_with_metadata_belongs_into_push_many() -> None:
    sample: Any = RolloutSample({"input_ids": [5]}, group_id="g", group_size=1)
    told = r"no mapping but RolloutSample; push it with push_many\(\[sample\]\)"
    with pytest.raises(SampleRefused, match=told):
        Encoder().encode([RolloutSample(sample)])
    with pytest.raises(SampleRefused, match="no mapping but list; push names to tensors"):
        Encoder().encode([RolloutSample([sample])])  # type: ignore[arg-type]


def test_large_arrays_are_sent_from_where_they_are_and_all_else_is_joined() -> None:
    ids = np.arange(JOINED_BYTES // 8)
    features = torch.ones(len(ids), 5, dtype=torch.bfloat16)
    sample = encode_only(input_ids=ids, loss_mask=ids > 3, features=features)
    buffers = payload([sample] * 2)
    assert [len(buffer) for buffer in buffers] == 2 * [features.nbytes, ids.nbytes, len(ids)]
    ids[0], features[0, 0] = 77, 0.0
    bits = features.view(torch.int16).numpy().tobytes()
    assert b"".join(buffers) == 2 * (bits + ids.tobytes() + (np.arange(len(ids)) > 3).tobytes())


#: What a field may be, by its name and the number of tokens.
_FIELDS: list[tuple[str, Callable[[int], Any]]] = [
    ("x", lambda n: np.arange(n, dtype=np.int16)),
    ("x", lambda n: np.arange(n, dtype=">i2")),
    ("x", lambda n: np.arange(2 * n, dtype=np.int16)[::2]),
    ("x", lambda n: np.arange(n, dtype=np.float32)),
    ("x", lambda n: torch.arange(n, dtype=torch.bfloat16)),
    ("x", lambda n: torch.arange(n, dtype=torch.int16)),
    ("x", lambda n: torch.arange(2.0 * n, requires_grad=True).reshape(2, -1).t()),
    ("x", lambda n: list(range(n))),
    ("x", lambda n: np.zeros((n, 2, 3), np.uint8)),
    ("x", lambda n: np.zeros(n + 1)),
    ("x", str),
    ("grid", lambda n: np.arange(n % 3 + 1)),
    ("reward", np.float32),
    ("reward", float),
    ("loss_mask", lambda n: np.arange(n) % 3 == 0),
    ("loss_mask", lambda n: torch.arange(n) % 2),
    ("loss_mask", np.arange),
    ("input_ids", torch.arange),
    ("input_ids", lambda n: np.zeros((n, 1), np.int64)),
    ("input_ids", int),
]


@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.sampled_from(_FIELDS))), max_size=6))
def test_what_came_before_makes_no_difference(
    samples: list[tuple[int, set[tuple[str, Callable[[int], Any]]]]],
) -> None:
    def told(encoder: Encoder, sample: RolloutSample) -> object:
        try:
            encoded = encoder.encode([sample])[0]
        except SampleRefused as refused:
            return str(refused)
        return encoded._replace(arrays=[]), span(encoded)

    experienced = Encoder(("grid",))
    for tokens, chosen in samples:
        made = {name: make(tokens) for name, make in sorted(chosen, key=_FIELDS.index)}
        sample = RolloutSample({"input_ids": np.arange(tokens)} | made)
        assert told(experienced, sample) == told(Encoder(("grid",)), sample)


def test_numbers_of_arrays_are_numbers() -> None:
    given: dict[str, Any] = {"group_size": np.int64(4), "policy_version": torch.tensor(3)}
    encoded = Encoder().encode([RolloutSample({"input_ids": [5]}, group_id="g", **given)])[0]
    found = (encoded.group_size, encoded.policy_version)
    assert found == (4, 3)
    assert set(map(type, found)) == {int}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"group_id": "g", "group_size": 0}, "group_size is 0; write how many samples the group"),
        ({"group_id": "g", "group_size": "close"}, "group_size is 'close', a str; write a whole"),
        ({"group_size": 4}, "group_size is 4, and no group_id says which samples belong together"),
        ({"group_size": "at-close"}, "group_size is at-close, and no group_id says"),
        ({"policy_version": 1.0}, "policy_version is 1.0, a float; write a whole number"),
    ],
)
def test_metadata_that_means_nothing_is_refused(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(SampleRefused, match=words):
        Encoder().encode([RolloutSample({"input_ids": [5]}, **metadata)])


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"group_id": 7, "group_size": 2}, "group_id is 7: Input should be a valid string"),
        ({"policy_version": -1}, "policy_version is -1: Input should be greater than or equal"),
        ({"sample_id": "x" * 5000}, r"sample_id is 'xxx.*\.\.\..*x': String should have at most"),
    ],
)
def test_what_no_push_can_have_is_told_by_the_name_it_was_given(
    metadata: dict[str, Any], words: str
) -> None:
    encoded = Encoder().encode([RolloutSample({"input_ids": [5]}, **metadata)])[0]
    with pytest.raises(SampleRefused, match=words) as caught:
        header([encoded], "p", 0)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("ids", [[1, -2, -3], np.array([1, -2], np.int32), torch.tensor([1, -2])])
def test_a_negative_token_id_is_refused_with_its_place(ids: Any) -> None:
    with pytest.raises(SampleRefused, match=r"input_ids\[1\] is -2, and token ids.*in loss_mask"):
        encode_only(input_ids=ids)
    assert encode_only(input_ids=np.array([255], np.uint8)).tokens == 1
    assert encode(labels=[-100, 6, 7]).tokens == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "make",
    [list, *(partial(torch.tensor, dtype=getattr(torch, f"{kind}")) for kind in FLOATS), np.array],
)
def test_a_number_that_is_not_finite_is_refused_with_its_place(
    make: Callable[[list[float]], Any], bad: float
) -> None:
    encoder, words = Encoder(), r"advantages\[1\] is NaN or infinite, .* allow_non_finite=True"
    encoder.encode([RolloutSample({"input_ids": [5, 6, 7], "advantages": make([0.5, 0.25, 1.0])})])[
        0
    ]
    sample = RolloutSample({"input_ids": [5, 6, 7], "advantages": make([0.5, bad, 1.0])})
    for each in (encoder, Encoder()):
        with pytest.raises(SampleRefused, match=words):
            each.encode([sample])
    assert Encoder(allow_non_finite=True).encode([sample])[0].tokens == 3
    for reward in (bad, np.float32(bad), torch.tensor(bad)):
        with pytest.raises(SampleRefused, match="reward is NaN or infinite"):
            encode(reward=reward)
    assert encode(hidden=np.full((3, 2), bad)).tokens == 3  # 0.5 ms a megabyte, of many


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_large_numbers_are_finite_and_one_that_is_not_is_found_among_many(dtype: Any) -> None:
    large = np.full(20_000, np.finfo(dtype).max)
    for size in (1, 3, 20_000):
        ids = np.arange(size)
        assert encode_only(input_ids=ids, x=large[:size]).tokens == size
        bad = large[:size].copy()
        bad[-1] = np.inf
        with pytest.raises(SampleRefused, match=rf"x\[{size - 1}\] is NaN or infinite"):
            encode_only(input_ids=ids, x=bad)
