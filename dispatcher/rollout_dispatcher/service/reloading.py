"""Settings that change while it serves: read again at SIGHUP, and put in force.

What is read is judged as a whole, by the same rules as at start. Invariant: of a change all or
nothing is put in force.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.service.access import Access
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_dispatcher.service.process import in_own_thread

log = logging.getLogger(__name__)

#: Options that may change; any other needs a restart.
RELOADABLE = ("window", "max_wait", "max_imbalance", "max_delay")
#: Outcomes, as metrics count them.
CHANGED, UNCHANGED, REFUSED = OUTCOMES = ("changed", "unchanged", "refused")


class Reloads:
    """The settings of one running dispatcher, as they were read last; lives on its event loop.

    apply: has them heeded. count: is told each outcome.
    """

    def __init__(
        self,
        config: ServeConfig,
        apply: Callable[[ServeConfig], None],
        count: Callable[[str], None],
    ) -> None:
        self.config = config
        #: Changes so far.
        self.generation = 0
        self._apply, self._count = apply, count

    def reread(self, config: ServeConfig, sources: Mapping[str, str]) -> None:
        """Flags, environment and file were read again. sources: of each option that is set, where.

        Raises ConfigError, and nothing has changed then.
        """
        before, after = self.config, config
        fixed = [
            f"{name} needs a restart ({getattr(before, name)} -> {getattr(after, name)}, "
            f"{sources.get(name, 'default')})"
            for name in ServeConfig.model_fields
            if name not in RELOADABLE and getattr(before, name) != getattr(after, name)
        ]
        if fixed:
            error = ConfigError(*fixed)
            self.refuse(error)
            raise error
        pairs = {name: (getattr(before, name), getattr(after, name)) for name in RELOADABLE}
        # What plans heed: a bound that follows from another option is one too.
        pairs["buffer_capacity"] = before.buffer_samples, after.buffer_samples
        changes = [f"{name} {old} -> {new}" for name, (old, new) in pairs.items() if old != new]
        if not changes:
            self._count(UNCHANGED)
            log.info(
                "SIGHUP: nothing changes; flags win over the environment, that over the file",
                extra={"event": "settings-unchanged"},
            )
            return
        self.config = config
        self.generation += 1
        self._count(CHANGED)
        log.info(
            "SIGHUP: %s, from the next plan on", ", ".join(changes),
            extra={"event": "settings-changed"},
        )  # fmt: skip
        self._apply(config)

    def refuse(self, error: ConfigError) -> None:
        """What was read cannot be: say so."""
        self._count(REFUSED)
        log.warning(
            "SIGHUP: nothing changes: %s", "; ".join(error.problems),
            extra={"event": "settings-refused"},
        )  # fmt: skip


class Read(Protocol):
    """What was read: a valid config, and where each option of it stands."""

    @property
    def config(self) -> ServeConfig:
        """The config."""

    @property
    def sources(self) -> Mapping[str, str]:
        """Flag, variable, or file and line of each option that was set."""


class Rereading:
    """Reads when it is asked to, one time after the other.

    read: from the disk, which may hang; raises ConfigError. reloads: None before there are any.
    renew: heeds what the files of tokens and certificates hold, and returns what has changed, in
    words.
    """

    def __init__(
        self,
        read: Callable[[], Read],
        reloads: Callable[[], Reloads | None],
        renew: Callable[[Access], list[str]],
    ) -> None:
        self._read, self._reloads, self._renew = read, reloads, renew
        self._task: asyncio.Task[None] | None = None
        self._is_asked = False

    def ask(self) -> None:
        """Read again, once what is being read is read."""
        self._is_asked = True
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="reread")

    async def _run(self) -> None:
        try:
            while self._is_asked:
                self._is_asked = False  # who asks from here on has changed something since
                await self._once()
        finally:
            self._task = None

    async def _once(self) -> None:
        reloads = self._reloads()
        if reloads is None:
            log.info(
                "SIGHUP: nothing changes; the journal is still being read",
                extra={"event": "settings-unchanged"},
            )
            return
        try:
            found, access = await in_own_thread(self._read_all)
        except ConfigError as error:
            reloads.refuse(error)
            return
        with suppress(ConfigError):  # it was logged and counted
            reloads.reread(found.config, found.sources)
            for change in self._renew(access):
                log.info("SIGHUP: %s", change, extra={"event": "access-renewed"})

    def _read_all(self) -> tuple[Read, Access]:
        found = self._read()
        return found, found.config.access()
