"""The settings in force, and what they may become: values, without anybody who heeds them.

    flags > environment > file > default    what was *read*, at start and at each SIGHUP
    over it                                 what was *posted*, until that very option is read anew
                                            with another value, or is posted as null

So a restart and a SIGHUP come to the same: what was posted holds on, unless the operator has
changed the flag, variable or line of that option since. Invariant: settings that exist fit
together, by the same rules as at start.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from rollout_dispatcher.core.facts import PostedSetting
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.hints import nearest
from rollout_dispatcher.service.config.checks import tuning_problems
from rollout_dispatcher.service.config.options import ServeConfig
from rollout_dispatcher.service.config.types import Multiple, NotNegative, Ratio
from rollout_dispatcher.service.config.units import Duration


class ConfigPatch(BaseModel):
    """Settings that may change while the dispatcher serves; null: as flags, environment and file
    say. What is not named stays.
    """

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)
    window_multiple: Multiple | None = None
    """samples to choose a step from, in dispatch batches; --buffer-capacity follows if unset"""
    max_wait: Duration | None = None
    """seconds, or text with a unit (500ms), after which a whole batch goes though ranks idle"""
    target_excess: Ratio | None = None
    """dispatch before the window is full once the plan wastes no more trainer time than this"""
    max_skips: NotNegative | None = None
    """dispatches that may pass a sample over, at least ceil(window_multiple) - 1"""


RELOADABLE = tuple(ConfigPatch.model_fields)


@dataclass(frozen=True, slots=True)
class Change:
    """One option, before and after."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name} {self.old} -> {self.new}"


@dataclass(frozen=True, slots=True)
class Settings:
    """read: what flags, environment and file say. sources: of each that was set, where.

    Raises ConfigError if what was posted does not fit what was read.
    """

    read: ServeConfig
    sources: Mapping[str, str] = field(default_factory=dict)
    posted: Mapping[str, PostedSetting] = field(default_factory=dict)
    config: ServeConfig = field(init=False)

    def __post_init__(self) -> None:
        values = {name: setting.value for name, setting in self.posted.items()}
        config = self.read.model_copy(update=values)
        if found := list(tuning_problems(config, frozenset(values))):
            raise ConfigError(*found)
        object.__setattr__(self, "config", config)

    def patched(self, body: Mapping[str, object], by: str) -> Self:
        """With these values posted. Raises ConfigError: nothing, or all of it."""
        patch = _patch(body)
        posted = dict(self.posted)
        for name in patch.model_fields_set:
            value = getattr(patch, name)
            if value is None:
                posted.pop(name, None)
            else:
                posted[name] = PostedSetting(name, value, getattr(self.read, name), by)
        return type(self)(self.read, self.sources, posted)

    def reread(self, read: ServeConfig, sources: Mapping[str, str]) -> Self:
        """With what flags, environment and file say now. Raises ConfigError."""
        fixed = [
            f"{name} needs a restart ({getattr(self.read, name)} -> {getattr(read, name)}, "
            f"{sources.get(name, 'default')})"
            for name in ServeConfig.model_fields
            if name not in RELOADABLE and getattr(read, name) != getattr(self.read, name)
        ]
        if fixed:
            raise ConfigError(*fixed)
        return type(self)(read, sources, _still(self.posted.values(), read))

    def resumed(self, posted: Iterable[PostedSetting]) -> Self:
        """With what an earlier process was posted, as far as it still holds and fits.

        Raises ConfigError if it does not fit what was read since.
        """
        return type(self)(self.read, self.sources, _still(posted, self.read))

    def changes(self, to: "Settings") -> list[Change]:
        """What would change, by what plans heed: a bound that follows from another is one too."""
        found = [
            Change(name, before, after)
            for name in RELOADABLE
            if (before := getattr(self.config, name)) != (after := getattr(to.config, name))
        ]
        before, after = self.config.buffer_samples, to.config.buffer_samples
        if before != after:
            found.append(Change("buffer_capacity", before, after))
        return found

    def source(self, name: str) -> str:
        """Where an option's value in force comes from."""
        if name in self.posted:
            return self.posted[name].by
        return self.sources.get(name, "default")


def _still(posted: Iterable[PostedSetting], read: ServeConfig) -> dict[str, PostedSetting]:
    """What was posted over what is still read."""
    return {
        setting.name: setting
        for setting in posted
        if setting.name in RELOADABLE and getattr(read, setting.name) == setting.base
    }


def _patch(body: Mapping[str, object]) -> ConfigPatch:
    """Raises ConfigError with all that is wrong with it: names, and values of the right ones."""
    problems = [_unknown(name) for name in body if name not in RELOADABLE]
    try:
        patch = ConfigPatch.model_validate(
            {name: body[name] for name in RELOADABLE if name in body}
        )
    except ValidationError as error:
        problems += map(_said, error.errors(include_url=False))
    if problems:
        raise ConfigError(*problems)
    return patch


def _unknown(name: str) -> str:
    if name in ServeConfig.model_fields:
        return f"{name} needs a restart"
    hint = nearest(name[:60], RELOADABLE)
    return f"there is no option {name[:60]}{hint}; what may change is {', '.join(RELOADABLE)}"


def _said(error: Mapping[str, Any]) -> str:
    message = str(error["msg"]).removeprefix("Value error, ").replace("Input should", "it must")
    return f"{'.'.join(map(str, error['loc']))}: {message[:1].lower()}{message[1:]}"
