"""`--fields`: what every sample has, as operators write it."""

import pytest

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.sample import DType, Field
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_dispatcher.service.config.values import format_field, parse_field


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("input_ids:int64", Field("input_ids", DType.INT64)),
        ("reward:float32:per-sample", Field("reward", DType.FLOAT32, per_token=False)),
        ("image:uint8[3x8]", Field("image", DType.UINT8, shape=(3, 8))),
        ("box:int32[4]:per-sample", Field("box", DType.INT32, per_token=False, shape=(4,))),
        ("pixels:float32[4]:ragged", Field("pixels", DType.FLOAT32, False, (4,), True)),
        ("crops:uint8:ragged", Field("crops", DType.UINT8, False, (), True)),
        ("env:str", Field.text("env")),
    ],
)
def test_a_field_reads_as_it_is_written(text: str, field: Field) -> None:
    assert parse_field(text) == field
    assert format_field(field) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("reward", "write name:dtype"),
        ("reward:float:per-sample", "no type 'float'; there are bool"),
        ("x:int64:sample", "per-token .*, per-sample or ragged, not 'sample'"),
        ("env:str:per-sample", "env is one text a sample; write env:str"),
        ("env:str[4]", "env is one text a sample; write env:str"),
        ("pixels_cu_rows:int32", "may not be called"),
        ("input_ids:int64:ragged", "input_ids is one number a token"),
        ("input_ids:str", "input_ids is one number a token"),
        ("loss_mask:bool:ragged", "loss_mask is one number a token"),
        ("x:int64[0]", "none of them empty"),
        ("x:int64[a]", "is written int64 or"),
        ("cu_seqlens:int32", "may not be called"),
        ("policy_version:int64", "may not be called"),
        ("input_ids:float32", "input_ids is one number a token"),
        ("loss_mask:bool:per-sample", "loss_mask is one number a token"),
    ],
)
def test_what_is_no_field_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_field(text)


def config(*fields: str) -> ServeConfig:
    return ServeConfig(dp_size=1, global_batch_size=4, micro_batch_size=1, fields=fields)


def test_fields_are_in_the_order_in_which_producers_send_them() -> None:
    schema = config("loss_mask:bool, input_ids:int64", "advantage:float32").declared_schema
    assert schema is not None
    assert schema.names == ("advantage", "input_ids", "loss_mask")
    assert config().declared_schema is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (("x:int64",), "every sample has input_ids"),
        (("input_ids:int64", "x:bool", "x:int8"), "x is declared twice"),
        (("input_ids:int64", *(f"f{n}:int8" for n in range(64))), "65 fields"),
    ],
)
def test_fields_that_no_sample_can_have_are_refused(fields: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=f"--fields: .*{words}"):
        config(*fields)
