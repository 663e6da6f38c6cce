"""Settings that change while it serves: asked for, judged as a whole, and put in force.

    flags > environment > file > default    what was *read*, at start and at each SIGHUP
    over it                                 what was *posted*, until that very option is read anew
                                            with another value, or is posted as null

So a restart and a SIGHUP come to the same: what was posted holds on, unless the operator has
changed the flag, variable or line of that option since. Invariants: settings that exist fit
together, by the same rules as at start; of a change all or nothing is put in force.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from rollout_dispatcher.core.facts import PostedSetting
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.hints import RENAMED, nearest, renamed
from rollout_dispatcher.service.access import Access
from rollout_dispatcher.service.config.checks import tuning_problems
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_dispatcher.service.config.values import Duration, Multiple, NotNegative, Ratio
from rollout_dispatcher.service.process import in_own_thread

log = logging.getLogger(__name__)


class ConfigPatch(BaseModel):
    """Settings that may change while the dispatcher serves; null: as flags, environment and file
    say. What is not named stays.
    """

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)
    window: Multiple | None = None
    """samples to choose a step from, in dispatch batches; --buffer-capacity follows if unset"""
    max_wait: Duration | None = None
    """seconds, or text with a unit (500ms), after which a whole batch goes though ranks idle"""
    max_imbalance: Ratio | None = None
    """share of trainer time that a plan may lose to stragglers and still go before the window is
    full"""
    max_delay: NotNegative | None = None
    """dispatches that may pass a sample over, at least ceil(window) - 1"""


RELOADABLE = tuple(ConfigPatch.model_fields)


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
        patch = _patch(renamed(body))
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
        now = (replace(each, name=RENAMED.get(each.name, each.name)) for each in posted)
        return type(self)(self.read, self.sources, _still(now, self.read))

    def changes(self, to: "Settings") -> list[str]:
        """What would change, by what plans heed: a bound that follows from another is one too."""
        pairs = {
            name: (getattr(self.config, name), getattr(to.config, name)) for name in RELOADABLE
        }
        pairs["buffer_capacity"] = self.config.buffer_samples, to.config.buffer_samples
        return [f"{name} {old} -> {new}" for name, (old, new) in pairs.items() if old != new]

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


#: Outcomes, as metrics count them.
CHANGED, UNCHANGED, REFUSED = OUTCOMES = ("changed", "unchanged", "refused")

#: Why a file that was edited may change nothing.
_ORDER = "; flags win over the environment, that over the file"


class Reloads:
    """The settings of one running dispatcher; lives on its event loop.

    apply: has them heeded. count: is told each outcome.
    """

    def __init__(
        self, settings: Settings, apply: Callable[[Settings], None], count: Callable[[str], None]
    ) -> None:
        self.settings = settings
        #: Changes so far.
        self.generation = 0
        self._apply, self._count = apply, count

    def post(self, body: Mapping[str, object], by: str) -> None:
        """Somebody asks for other values. Raises ConfigError, and nothing has changed then."""
        self._take(lambda: self.settings.patched(body, by), by)

    def reread(self, read: ServeConfig, sources: Mapping[str, str], by: str) -> None:
        """Flags, environment and file were read again. Raises as `post` does."""
        self._take(lambda: self.settings.reread(read, sources), by, _ORDER)

    def refuse(self, error: ConfigError, by: str) -> None:
        """What was asked for cannot be: say so."""
        self._count(REFUSED)
        log.warning("%s: nothing changes: %s", by, "; ".join(error.problems))

    def _take(self, propose: Callable[[], Settings], by: str, why_not: str = "") -> None:
        try:
            new = propose()
        except ConfigError as error:
            self.refuse(error, by)
            raise
        old, self.settings = self.settings, new
        changes = old.changes(new)
        if not changes:
            self._count(UNCHANGED)
            log.info("%s: nothing changes%s", by, why_not)
        else:
            self.generation += 1
            self._count(CHANGED)
            log.info("%s: %s, from the next plan on", by, ", ".join(changes))
        if changes or old.posted != new.posted:
            self._apply(new)


def resume(settings: Settings, posted: Iterable[PostedSetting]) -> Settings:
    """With what was posted to an earlier process, as far as that still holds; the log says how."""
    before = tuple(posted)
    try:
        found = settings.resumed(before)
    except ConfigError as error:
        log.warning(
            "settings posted before the restart contradict the options and are ignored: %s",
            "; ".join(error.problems),
        )
        return settings
    for setting in before:
        if RENAMED.get(setting.name, setting.name) in found.posted:
            log.info("%s is %s, as of %s", setting.name, setting.value, setting.by)
        else:
            log.info(
                "%s was %s as of %s, and its option has changed since: that counts",
                setting.name, setting.value, setting.by,
            )  # fmt: skip
    return found


BY = "SIGHUP"
#: Longer than that no file takes that can be read.
PATIENCE_SECONDS = 10.0


class Read(Protocol):
    """What was read: a valid config, and where each option of it stands."""

    @property
    def config(self) -> ServeConfig:
        """The config."""

    @property
    def sources(self) -> Mapping[str, str]:
        """Flag, variable, or file and line of each option that was set."""

    @property
    def notes(self) -> Sequence[str]:
        """What was written as in 0.1, and how to write it."""


class Rereading:
    """Reads once for each time that it is asked to, one after the other.

    A file that hangs is given up, and until it has been read there is no second who waits for it.
    read: from the disk, which may hang; raises ConfigError. reloads: None before there are any.
    within: what is entered while it reads, once it may. renew: heeds what the files of tokens and
    certificates hold, and returns what has changed, in words.
    """

    def __init__(
        self,
        read: Callable[[], Read],
        reloads: Callable[[], Reloads | None],
        within: Callable[[], AbstractContextManager[None]],
        renew: Callable[[Access], list[str]],
    ) -> None:
        self._read, self._reloads, self._within, self._renew = read, reloads, within, renew
        self._task: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[tuple[Read, Access]] | None = None
        self._asked = 0

    def ask(self) -> None:
        """Read again, once what is being read is read."""
        self._asked += 1
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="reread")

    async def _run(self) -> None:
        try:
            while self._asked:
                self._asked = 0  # who asks from here on has changed something since
                await self._once()
        finally:
            self._task = None

    async def _once(self) -> None:
        reloads = self._reloads()
        if reloads is None:
            log.info("%s: nothing changes; the journal is still being read", BY)
            return
        with self._within():
            try:
                found, access = await asyncio.wait_for(self._read_anew(), PATIENCE_SECONDS)
            except TimeoutError:
                hangs = (
                    f"the config file was not read within {PATIENCE_SECONDS:g} s: its disk hangs"
                )
                reloads.refuse(ConfigError(hangs), BY)
                return
            except ConfigError as error:
                reloads.refuse(error, BY)
                return
            with suppress(ConfigError):  # it was logged and counted
                reloads.reread(found.config, found.sources, BY)
                for change in self._renew(access):
                    log.info("%s: %s", BY, change)

    def _read_all(self) -> tuple[Read, Access]:
        found = self._read()
        return found, found.config.access()

    async def _read_anew(self) -> tuple[Read, Access]:
        """What stands there now: who was given up before may have read what is old."""
        if self._reading is not None:
            await asyncio.wait([self._reading])
        self._reading = asyncio.create_task(in_own_thread(self._read_all), name="read options")
        self._reading.add_done_callback(self._has_read)
        return await asyncio.shield(self._reading)

    def _has_read(self, reading: "asyncio.Task[tuple[Read, Access]]") -> None:
        self._reading = None
        if not reading.cancelled():
            reading.exception()  # nobody may wait for it any more
