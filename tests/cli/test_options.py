"""Loading: every option by flag, variable and file, and nothing misspelt is let through."""

from pathlib import Path
from typing import Annotated, Self

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout_dispatcher.cli.options import Loaded, is_advanced, load_config
from rollout_dispatcher.cli.problems import flag_of, set_flag_of
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.hints import REMOVED, RENAMED
from rollout_dispatcher.service.config.serve import ServeConfig
from tests.support.options import FIXED

NEEDED = ["--dp-size", "2", "--global-batch-size", "8", "--micro-batch-size", "2"]


def load(argv: list[str], environ: dict[str, str] | None = None) -> Loaded[ServeConfig]:
    return load_config(ServeConfig, argv, environ or {}, prog="serve")


def refusal(argv: list[str], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(argv, environ)
    return str(caught.value)


def toml(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    return ["--config", str(path)]


def test_flags_beat_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    text = "max_delay = 7\nmax_open_steps = 7\n[advanced]\nproducer_credits = 7"
    file = toml(tmp_path, text)
    environ = {"DISPATCHER_MAX_DELAY": "8", "DISPATCHER_MAX_OPEN_STEPS": "8"}
    loaded = load([*NEEDED, *file, "--max-delay", "9"], environ)
    config = loaded.config
    assert (config.max_delay, config.max_open_steps, config.producer_credits) == (9, 8, 7)
    assert loaded.sources["max_delay"] == "--max-delay"
    assert loaded.sources["max_open_steps"] == "DISPATCHER_MAX_OPEN_STEPS"
    assert loaded.sources["producer_credits"] == f"{file[1]}:4"
    assert "max_wait" not in loaded.sources
    assert config.max_wait == 2.0


def test_the_config_file_can_be_named_in_the_environment(tmp_path: Path) -> None:
    path = toml(tmp_path, "dp_size = 2\nglobal_batch_size = 8\nmicro_batch_size = 2")[1]
    assert load([], {"DISPATCHER_CONFIG": path}).config.dp_size == 2


def test_several_addresses_are_a_flag_each_or_parts_of_a_text(tmp_path: Path) -> None:
    flags = ["--listen", "127.0.0.1:1", "--listen", "unix:/a.sock"]
    environ = {"DISPATCHER_LISTEN": "127.0.0.1:1, unix:/a.sock"}
    for config in (load([*NEEDED, *flags]).config, load(NEEDED, environ).config):
        assert [str(item) for item in config.listen] == ["127.0.0.1:1", "unix:/a.sock"]
    file = toml(tmp_path, 'listen = "unix:/a.sock"')  # one needs no list
    assert [str(item) for item in load([*NEEDED, *file]).config.listen] == ["unix:/a.sock"]
    (told,) = problems([*NEEDED, "--listen", "127.0.0.1:1", "--listen", "nowhere"])
    assert told.startswith("--listen nowhere: "), "the wrong one alone"


def test_none_unsets_what_a_weaker_source_set(tmp_path: Path) -> None:
    file = toml(tmp_path, "max_staleness = 4")
    assert load([*NEEDED, *file]).config.max_staleness == 4
    assert load([*NEEDED, *file, "--max-staleness", "none"]).config.max_staleness is None


def test_a_switch_can_be_turned_off() -> None:
    environ = {"DISPATCHER_INSECURE": "on"}
    assert load([*NEEDED, "--no-insecure"], environ).config.insecure is False
    assert load([*NEEDED, "--set", "per-rank-metrics=off"]).config.per_rank_metrics is False


def test_an_advanced_option_is_set_by_name(tmp_path: Path) -> None:
    file = toml(tmp_path, '[advanced]\nrank_tokens = 7\ngroup_timeout = "7s"')
    environ = {"DISPATCHER_GROUP_TIMEOUT": "8s", "DISPATCHER_BLOCKED_PUSH_BYTES": "8MiB"}
    loaded = load(
        [*NEEDED, *file, "--set", "blocked-push-bytes=9MiB", "--set", "rank_tokens=none"], environ
    )
    config = loaded.config
    found = (config.rank_tokens, config.group_timeout, config.blocked_push_bytes)
    assert found == (None, 8.0, 9 * 2**20)
    assert loaded.sources["blocked_push_bytes"] == "--set blocked-push-bytes"


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("rank-token=5", "--set rank-token: unknown setting (did you mean rank-tokens?)"),
        ("rank-tokens", "--set rank-tokens: write --set rank-tokens=VALUE"),
        ("max-delay=5", "--set max-delay: this option has a flag of its own; write --max-delay"),
        ("rank-tokens=many", "--set rank-tokens=many: write a whole number"),
        ("write-timeout=5s", "--set write-timeout: unknown setting"),
    ],
)
def test_what_is_set_wrongly_is_told_with_what_to_write(text: str, fact: str) -> None:
    assert refusal([*NEEDED, "--set", text]).startswith(fact)


@pytest.mark.parametrize(
    ("key", "fact"),
    [
        ("max_delay = 5", ":2: max_delay stands by itself, above the table [advanced]"),
        ("rank_token = 5", ":2: unknown key rank_token (did you mean rank_tokens?)"),
        ("rank_tokens = -5", ":2: rank_tokens = -5: it must be at least 1"),
        ("write_timeout = 5", ":2: unknown key write_timeout"),
    ],
)
def test_what_stands_wrongly_in_the_table_is_told_with_its_line(
    tmp_path: Path, key: str, fact: str
) -> None:
    file = toml(tmp_path, f"[advanced]\n{key}")
    assert refusal([*NEEDED, *file]).startswith(f"{file[1]}{fact}")


def test_a_table_that_is_written_with_a_dot_is_found(tmp_path: Path) -> None:
    file = toml(tmp_path, "max_delay = 9\nadvanced.rank_tokens = -5")
    assert f"{file[1]}:2: rank_tokens" in refusal([*NEEDED, *file])


def test_an_advanced_option_that_is_written_as_others_are_is_told_where_it_stands(
    tmp_path: Path,
) -> None:
    file = toml(tmp_path, 'group_timeout = "7s"')
    told = problems([*NEEDED, *file, "--rank-tokens", "5000", "--no-per-rank-metrics"])
    assert list(told) == [
        "unknown argument --rank-tokens (write --set rank-tokens=VALUE); see serve --help",
        (
            "unknown argument --no-per-rank-metrics (write --set per-rank-metrics=VALUE); see "
            "serve --help"
        ),
        f"{file[1]}:1: group_timeout stands in the table [advanced]",
    ]


@pytest.mark.parametrize("name", sorted(FIXED))
def test_what_is_no_option_any_more_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    file = toml(tmp_path, f"{name} = 5")
    argv = [*NEEDED, flag_of(name), "5", *file]
    told = problems(argv, {f"DISPATCHER_{name.upper()}": "5"})
    assert len(told) == 3
    assert all(f"(it was removed: {REMOVED[flag_of(name)[2:]]})" in text for text in told)


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["--windw", "2"], {}, "--window"),
        (["--window-mult", "2"], {}, "--window"),  # no flag is abbreviated
        (["extra"], {}, "unknown argument extra"),
        ([], {"DISPATCHER_MAX_WIAT": "2s"}, "DISPATCHER_MAX_WAIT"),
        (["--config", "/absent.toml"], {}, "No such file"),
        (["--config", "/"], {}, "cannot be read"),
    ],
)
def test_what_is_not_known_or_not_there_is_refused_and_the_nearest_named(
    argv: list[str], environ: dict[str, str], words: str
) -> None:
    assert words in refusal([*NEEDED, *argv], environ)


@pytest.mark.parametrize(("old", "name"), sorted(RENAMED.items()))
def test_what_an_option_was_called_names_what_it_is_called_now(
    old: str, name: str, tmp_path: Path
) -> None:
    advanced = is_advanced(ServeConfig.model_fields[name])
    flag = f"(write {set_flag_of(name)}=" if advanced else f"(did you mean {flag_of(name)}?"
    assert flag in refusal([*NEEDED, flag_of(old), "1"])
    assert f"(did you mean {name}?" in refusal([*NEEDED, *toml(tmp_path, f"{old} = 1")])
    told = refusal(NEEDED, {f"DISPATCHER_{old.upper()}": "1"})
    assert f"(did you mean DISPATCHER_{name.upper()}?" in told


def test_what_kubernetes_sets_beside_a_service_is_not_ours() -> None:
    foreign = {
        "DISPATCHER_SERVICE_HOST": "10.0.0.1",
        "DISPATCHER_SERVICE_PORT_HTTP": "9471",
        "DISPATCHER_PORT": "tcp://10.0.0.1:7077",
        "DISPATCHER_PORT_7077_TCP_ADDR": "10.0.0.1",
    }
    assert load(NEEDED, foreign).config == load(NEEDED).config


@pytest.mark.parametrize("key", ["max_wiat", "max-wait", "Max_Wait"])
def test_a_misspelt_key_names_the_nearest_and_the_file(tmp_path: Path, key: str) -> None:
    file = toml(tmp_path, f'{key} = "2s"')
    message = refusal([*NEEDED, *file])
    assert key in message
    assert "max_wait" in message
    assert file[1] in message


@pytest.mark.parametrize("text", ["dp_size = ", "dp_size 2", "\x00"])
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, text: str) -> None:
    assert "TOML" in refusal(toml(tmp_path, text))


@pytest.mark.parametrize("name", ["max_delay", "max_wait", "layout", "listen", "buffer_bytes"])
def test_a_bad_value_names_the_place_where_it_was_written(tmp_path: Path, name: str) -> None:
    flag, variable = flag_of(name), f"DISPATCHER_{name.upper()}"
    assert flag in refusal([*NEEDED, flag, "bad"])
    assert variable in refusal(NEEDED, {variable: "bad"})
    file = toml(tmp_path, f'{name} = "bad"')
    assert f"{file[1]}:1: {name}" in refusal([*NEEDED, *file])


def problems(argv: list[str], environ: dict[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(argv, environ)
    return caught.value.problems


def test_everything_that_is_wrong_is_told_at_once_with_its_place(tmp_path: Path) -> None:
    file = toml(tmp_path, 'layuot = "packed"\n\nmax_delay = -1\nsample_retention = "checkpoint"')
    environ = {"DISPATCHER_MAX_WAIT": "100", "DISPATCHER_MAX_WIAT": "2s"}
    flags = ["--dp-size", "2", "--micro-batch-size", "8", "--strategy", "windw", "--wat", "2"]
    path = file[1]
    assert set(problems([*flags, *file], environ)) == {
        "unknown argument --wat (did you mean --max-wait?); see serve --help",
        f"{path}:1: unknown key layuot (did you mean layout?)",
        "unknown environment variable DISPATCHER_MAX_WIAT (did you mean DISPATCHER_MAX_WAIT?)",
        "--strategy windw: write round-robin, greedy, kk or window; did you mean window?",
        f"{path}:3: max_delay = -1: it must be at least 0",
        (
            "DISPATCHER_MAX_WAIT=100: write a number and a unit (ms, s, m, h, d), as in 100ms, 2s, "
            "5m"
        ),
        (
            "--sample-retention checkpoint keeps the samples of committed steps in the journal; "
            f"set --journal-dir, or take --sample-retention commit [sample_retention in {path}:4]"
        ),
        (
            "a step has a number of samples or of groups, and neither is set; set exactly one of "
            "--global-batch-size and --global-batch-groups"
        ),
    }


def test_nothing_at_all_names_all_that_a_run_needs() -> None:
    required, batch, micro_batch = problems([])
    assert "--dp-size is required" in required
    assert "DISPATCHER_DP_SIZE" in required
    assert "--global-batch-size" in batch
    assert "--micro-batch-size" in micro_batch


def test_what_rests_on_a_mistake_is_not_a_second_mistake() -> None:
    (told,) = problems([*NEEDED, "--micro-batch-size", "0"])
    assert told == "--micro-batch-size 0: it must be at least 1"


@pytest.mark.parametrize(
    ("flag", "value", "meant"),
    [
        ("--max-delay", "1e3", "1000"),
        ("--set", "max-sample-tokens=64k", "64000"),
        ("--groups", "Step", "step"),
        ("--journal-sync", "bach", "batch"),
    ],
)
def test_a_misspelt_value_names_what_may_be_meant(flag: str, value: str, meant: str) -> None:
    assert refusal([*NEEDED, flag, value]).endswith(f"did you mean {meant}?")


def test_settings_that_contradict_each_other_are_all_told() -> None:
    told = problems([*NEEDED, "--max-delay", "0", "--buffer-capacity", "1", "--group-size", "3"])
    assert [text.partition(" ")[0] for text in told] == ["max_delay", "--buffer-capacity", "groups"]


def test_a_line_is_found_though_a_text_before_it_looks_alike(tmp_path: Path) -> None:
    text = 'cost = """\nmax_delay = 3\n"""\n  "max_delay" = -1'
    assert f"{toml(tmp_path, text)[1]}:4: max_delay" in refusal([*NEEDED, *toml(tmp_path, text)])


def test_options_in_a_table_are_told_where_they_belong(tmp_path: Path) -> None:
    told = refusal([*NEEDED, *toml(tmp_path, "\n[serve]\nmax_delay = 3")])
    assert "serve.toml:2: options stand by themselves, not in a table [serve]" in told


class Together(BaseModel):
    """Two settings that are wrong together, and one whose default is."""

    model_config = ConfigDict(validate_default=True)
    low: int = 0
    high: int = 0
    size: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError("--low is above --high")
        return self


def test_what_settings_are_together_is_told_without_the_name_of_one() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Together, ["--low", "2"], {}, prog="serve")
    assert str(caught.value) == "--low is above --high"


def test_a_default_that_cannot_be_used_is_not_called_missing() -> None:
    class Unlucky(Together):
        size: Annotated[int, Field(ge=1)] = 0

    with pytest.raises(ConfigError) as caught:
        load_config(Unlucky, [], {}, prog="serve")
    assert str(caught.value) == "--size: it must be at least 1"


def test_what_may_stand_in_a_file_that_cannot_be_read_is_not_called_missing(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.toml")
    assert problems(["--wat", "--config", absent]) == (
        "unknown argument --wat (did you mean --max-wait?); see serve --help",
        f"--config {absent} cannot be read: No such file or directory",
    )
