"""Samples by reference as JSON: where they lie and what is there, or an error that says why not."""

import json
from typing import Any

import pytest

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.sample import SIZE_AT_CLOSE, DType, Field, Sample, Schema
from rollout_dispatcher.service.http.tensors import Reading
from tests.support.bodies import parse_body

SCHEMA = Schema((Field("input_ids", DType.INT64), Field("loss_mask", DType.BOOL)))
PLACE: dict[str, Any] = {"store": "file:///mnt/rollouts", "key": "web-7c1e/17", "nbytes": 144}
ONE: dict[str, Any] = {
    "reference": PLACE, "fields": ["input_ids:int64", "loss_mask:bool"],
    "tokens": 5, "loss_tokens": 3,
}  # fmt: skip


def parse(*samples: dict[str, Any], reading: Reading | None = None) -> list[Sample]:
    found, _ = parse_body(json.dumps(samples).encode(), reading or Reading())
    return found


def at(**place: object) -> dict[str, Any]:
    return {"reference": PLACE | place}


def test_a_sample_is_where_it_says_and_as_large_as_its_fields_are() -> None:
    (sample,) = parse(ONE | at(offset=48))
    assert sample.payload == Reference(StoredObject(**PLACE), 48, 48)
    assert (sample.tokens, sample.loss_tokens, sample.schema) == (5, 3, SCHEMA)
    assert (sample.memory_bytes, sample.footprint) == (0, (0, 48))


def test_samples_share_the_runs_schema() -> None:
    known = Schema(SCHEMA.fields)
    first, second = parse(ONE, ONE | at(key="web-7c1e/18"), reading=Reading(schema=known))
    assert first.schema is second.schema is known


def test_each_has_an_object_of_its_own() -> None:
    with pytest.raises(ProtocolError, match="another sample of the request lies in web-7c1e/17"):
        parse(ONE, ONE | at(offset=48))
    assert len(parse(ONE, ONE | at(store="file:///mnt/others"))) == 2


def test_samples_with_their_tensors_may_be_beside_them() -> None:
    tensors = {"fields": {"input_ids": [1, 2], "loss_mask": [False, True]}, "sample_id": "b"}
    first, second = parse(ONE | {"sample_id": "a"}, tensors)
    assert first.schema == second.schema
    assert (first.is_in_memory, second.is_in_memory) == (False, True)


def test_it_has_the_metadata_of_every_sample() -> None:
    told = {"sample_id": "a", "group_id": "g", "group_size": "at-close", "policy_version": 7}
    (sample,) = parse(ONE | told)
    assert (sample.sample_id, sample.group_id, sample.policy_version) == ("a", "g", 7)
    assert sample.group_size == SIZE_AT_CLOSE


def test_rows_of_ragged_fields_and_texts_are_counted() -> None:
    fields = ["env:str", "input_ids:int32", "pixels:float32[4]:ragged", "reward:float32:per-sample"]
    (sample,) = parse(ONE | {"fields": fields, "rows": {"pixels": 3, "env": 9}})
    assert sample.rows == (9, 3)
    assert sample.nbytes == 16 + 24 + 48 + 8


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"reference": {}}, "reference.store: it is missing"),
        (at(key="k" * 513), "reference.key: it must have at most 512 characters"),
        (at(nbytes=0), "reference.nbytes: it must be greater than or equal to 1"),
        (at(size=3), "reference.size: there is no such key"),
        (at(offset=97), "begins at byte 97 of the object web-7c1e/17, which has 144"),
        ({"fields": {"input_ids": [1]}}, "fields: it must be a valid list"),
        ({"fields": ["input_ids:int64" + " " * 999]}, "fields.0: it must have at most 384 char"),
        ({"fields": ["input_ids"]}, "fields: write name:dtype"),
        ({"fields": ["reward:float32"]}, "every sample has input_ids"),
        ({"fields": ["input_ids:int64", "cu_seqlens:int32"]}, "may not be called 'cu_seqlens'"),
        ({"fields": ["loss_mask:bool", "input_ids:int64"]}, "of their names: input_ids, loss_mask"),
        ({"rows": {"pixels": 1}}, "rows has pixels, and the ragged fields are none"),
        ({"group_size": 2}, "no group_id says which samples belong together"),
        ({"per_sample": ["reward"]}, "per_sample: there is no such key"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_with_the_name_of_the_field(
    wrong: dict[str, Any], words: str
) -> None:
    with pytest.raises(ProtocolError) as raised:
        parse(ONE | wrong)
    assert words in str(raised.value)
    assert "(line 1 column 2)" in str(raised.value)


@pytest.mark.parametrize("name", ["tokens", "loss_tokens", "fields"])
def test_what_nobody_can_find_out_has_to_be_said(name: str) -> None:
    with pytest.raises(ProtocolError, match=f"{name}: it is missing"):
        parse({key: value for key, value in ONE.items() if key != name})
