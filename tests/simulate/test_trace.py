"""Traces: every form that is promised is read, and what cannot be read names file and line."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.simulate.trace import PROFILE_ROWS, PROFILES, load_trace
from tests.simulate.bench import HEADER, shared_trace


def write(tmp_path: Path, *rows: str, header: str = HEADER, name: str = "t.csv") -> str:
    path = tmp_path / name
    path.write_text("\n".join([header, *rows]) + "\n")
    return str(path)


def refusal(source: str, run: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_trace(source, run)
    return str(caught.value)


def test_a_sample_is_as_long_as_prompt_and_response_and_keeps_its_row(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path, "0.5,a,0,10,5,0", "1.5,a,1,,7,", ",b,1,3,,1"))
    assert trace.tokens.tolist() == [15, 7, 3]
    assert trace.row.tolist() == [0, 1, 2]
    assert trace.group.tolist() == [0, 0, 1]
    assert trace.arrival.tolist()[:2] == [0.5, 1.5]
    assert np.isnan(trace.arrival[2])


def test_a_zipped_file_is_known_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "plain-name"
    path.write_bytes(gzip.compress(f"{HEADER}\n,,,4,4,\n".encode()))
    assert load_trace(str(path)).tokens.tolist() == [8]


def test_columns_come_in_any_order_and_may_lack(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path, "7,x,first", header="response_tokens,model,group"))
    assert (trace.tokens.tolist(), trace.group.tolist()) == ([7], [0])


def test_a_file_written_by_a_spreadsheet_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(f'\ufeff{HEADER}\r\n,,,"12", 3,\r\n\r\n'.encode())
    assert load_trace(str(path)).tokens.tolist() == [15]


def test_one_run_can_be_picked_and_rows_keep_their_numbers(tmp_path: Path) -> None:
    source = write(tmp_path, ",,0,1,1,", ",,4,2,2,", ",,0,3,3,", ",,4,4,4,")
    trace = load_trace(source, "4")
    assert (trace.row.tolist(), trace.tokens.tolist()) == ([1, 3], [4, 8])
    assert "it has 0, 4" in refusal(source, "5")


def test_rows_without_tokens_are_left_out_and_counted(tmp_path: Path) -> None:
    source = write(tmp_path, ",,,,,", ",,,5,0,", ",,,0,0,")
    trace = load_trace(source)
    assert (trace.row.tolist(), trace.empty_rows) == ([1], 2)
    assert "no sample" in refusal(write(tmp_path, ",,,0,0,", name="none.csv"))


@pytest.mark.parametrize(
    ("row", "fact"),
    [
        (",,,ten,1,", "line 3: prompt_tokens is 'ten'"),
        (",,,1,-1,", "line 3: response_tokens is '-1'"),
        (",,,1,1.5,", "line 3: response_tokens is '1.5'"),
        (",,,1,99999999999,", "line 3: response_tokens"),
        ("soon,,,1,1,", "line 3: arrival_s is 'soon'"),
        ("nan,,,1,1,", "line 3: arrival_s is 'nan'"),
        ("1,1,1", "line 3: 3 cells under 6 columns"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: str, fact: str) -> None:
    source = write(tmp_path, ",,,1,1,", row)
    assert f"{source}, {fact}" in refusal(source)


def test_a_file_without_lengths_is_refused(tmp_path: Path) -> None:
    assert "line 1: no column prompt_tokens" in refusal(write(tmp_path, "1", header="tokens"))
    assert "line 1" in refusal(write(tmp_path, header=""))
    assert "named twice" in refusal(write(tmp_path, header="prompt_tokens,prompt_tokens"))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole = gzip.compress(f"{HEADER}\n{',,,1,1,' * 1}\n".encode() * 500)
    for name, data in (
        ("cut.gz", whole[: len(whole) // 2]),
        ("bent.gz", whole[:30] + bytes([whole[30] ^ 255]) + whole[31:]),
        ("latin.csv", HEADER.encode() + b"\n,\xff,,1,1,\n"),
        ("null.csv", HEADER.encode() + b"\n" + b'"' + b"x" * 200_000 + b"\n"),
    ):
        (tmp_path / name).write_bytes(data)
        assert name in refusal(str(tmp_path / name))
    assert str(tmp_path) in refusal(str(tmp_path))


def test_a_profile_is_drawn_anew_with_every_seed() -> None:
    first, again, other = (load_trace("lineage", seed=seed) for seed in (1, 1, 2))
    assert len(first) == PROFILE_ROWS
    assert (first.tokens == again.tokens).all()
    assert (first.tokens != other.tokens).any()
    assert "--run 3" in refusal("lineage", "3")


def test_a_misspelt_profile_names_the_nearest_and_a_strange_one_all() -> None:
    assert "did you mean lineage?" in refusal("linage")
    assert all(name in refusal("/nowhere/t.csv") for name in PROFILES)


@pytest.mark.parametrize(
    ("name", "samples", "groups", "longest"),
    [("lineage_open_reasoning", 3040, 160, 67024), ("reasoning_gym_rlvr_g3", 30300, 10100, 14724)],
)
def test_real_traces_are_read(
    root: Path, name: str, samples: int, groups: int, longest: int
) -> None:
    trace = load_trace(str(shared_trace(root, name)))
    assert (len(trace), len(set(trace.group.tolist()))) == (samples, groups)
    assert trace.tokens.max() == longest
