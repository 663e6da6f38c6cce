"""What settings may become: judged as a whole, all or nothing, and named where it cannot be."""

from typing import Any

import pytest

from rollout_dispatcher.core.facts import PostedSetting
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_dispatcher.service.reloading import ConfigPatch, Settings


def config(**changes: Any) -> ServeConfig:
    return ServeConfig.model_validate(
        {"dp_size": 2, "global_batch_size": 8, "micro_batch_size": 2} | changes
    )


def settings(**changes: Any) -> Settings:
    return Settings(config(**changes), dict.fromkeys(changes, "serve.toml:3"))


def refusal(before: Settings, body: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        before.patched(body, "me")
    return str(caught.value)


def test_what_may_change_is_an_option_and_validated_as_that_is() -> None:
    for name, field in ConfigPatch.model_fields.items():
        option = ServeConfig.model_fields[name]
        assert str(option.annotation) in str(field.annotation) or option.metadata


def test_what_is_posted_holds_and_what_follows_from_it_follows() -> None:
    before = settings(window=1.5)
    after = before.patched({"window": 2.5, "max_wait": "500ms"}, "me")
    assert (after.config.window, after.config.max_wait) == (2.5, 0.5)
    assert after.config.buffer_samples == 20
    assert list(map(str, before.changes(after))) == [
        "window 1.5 -> 2.5",
        "max_wait 2.0 -> 0.5",
        "buffer_capacity 12 -> 20",
    ]
    assert (after.source("window"), before.source("window")) == (
        "me",
        "serve.toml:3",
    )


def test_null_is_what_flags_and_file_say() -> None:
    before = settings(max_wait=3.0)
    changed = before.patched({"max_wait": 1.0}, "me")
    assert changed.patched({"max_wait": None}, "me").config.max_wait == 3.0


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"dp_size": 4}, "dp_size needs a restart"),
        ({"windw_multiple": 2}, "there is no option windw_multiple"),
        ({"max_delay": 0}, "max_delay is 0"),
        ({"window": 9, "max_delay": 3}, "max_delay is 3"),
        ({"window": 0.5}, "window: it must be greater than or equal to 1"),
        ({"max_wait": "5"}, "did you mean 5ms or 5s?"),
        ({"max_wait": 0}, "max_wait"),
        ({"max_imbalance": "nan"}, "max_imbalance"),
        ({"max_delay": 1.5}, "max_delay"),
        ({"max_wait": True, "max_imbalance": []}, "max_imbalance"),
    ],
)
def test_what_cannot_be_is_named(body: dict[str, object], told: str) -> None:
    assert told in refusal(settings(), body)


def test_all_that_is_wrong_is_told_at_once_and_misspelt_names_are_hinted() -> None:
    body = {"max_dlay": 4, "dp_size": 8, "window": -2, "max_wait": "500", "what": 1}
    with pytest.raises(ConfigError) as caught:
        settings().patched(body, "me")
    misspelt, fixed, unknown, window, wait = caught.value.problems
    assert misspelt.startswith("there is no option max_dlay (did you mean max_delay?)")
    assert fixed == "dp_size needs a restart"
    assert unknown.startswith("there is no option what; what may change is window, ")
    assert window.startswith("window: ")
    assert wait.startswith("max_wait: ")


def test_a_window_that_the_buffer_does_not_hold_is_refused() -> None:
    assert "--buffer-capacity 12" in refusal(settings(buffer_capacity=12), {"window": 2})


def test_options_that_are_read_again_may_differ_in_these_alone() -> None:
    before = settings(max_wait=1.0)
    after = before.reread(config(max_wait=2.5, max_delay=9), {"max_wait": "serve.toml:4"})
    assert (after.config.max_wait, after.config.max_delay) == (2.5, 9)
    with pytest.raises(ConfigError) as caught:
        before.reread(config(dp_size=4, max_wait=2.5, http="127.0.0.1:1"), {"dp_size": "x:1"})
    first, second = caught.value.problems
    assert first == "dp_size needs a restart (2 -> 4, x:1)"
    assert second.startswith("http needs a restart")


def test_what_was_posted_holds_on_until_its_own_option_is_read_anew() -> None:
    posted = settings(max_wait=1.0).patched({"max_wait": 0.5, "max_delay": 9}, "me")
    assert posted.reread(config(max_wait=1.0, max_imbalance=0.5), {}).config.max_wait == 0.5
    after = posted.reread(config(max_wait=4.0), {})
    assert (after.config.max_wait, after.config.max_delay) == (4.0, 9)


def test_a_restart_goes_on_with_what_was_posted_as_a_sighup_would() -> None:
    posted = tuple(settings(max_wait=1.0).patched({"max_wait": 0.5}, "me").posted.values())
    assert settings(max_wait=1.0).resumed(posted).config.max_wait == 0.5
    assert settings(max_wait=3.0).resumed(posted).config.max_wait == 3.0


def test_settings_answer_to_the_names_that_they_had() -> None:
    posted = settings().patched({"window_multiple": 2.0, "target_excess": 0.5}, "me")
    assert (posted.config.window, posted.config.max_imbalance) == (2.0, 0.5)
    journal = (PostedSetting("max_skips", 9, settings().read.max_delay, "me"),)
    assert settings().resumed(journal).config.max_delay == 9
    assert settings(max_delay=8).resumed(journal).config.max_delay == 8


def test_what_was_posted_and_does_not_fit_any_more_is_an_error() -> None:
    posted = tuple(settings().patched({"max_delay": 1}, "me").posted.values())
    with pytest.raises(ConfigError, match="max_delay is 1"):
        settings(window=4).resumed(posted)
