"""SIGHUP: flags, environment, files of options, tokens and certificates are read again, beside the
event loop.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.service.access import Access
from rollout_dispatcher.service.config.options import ServeConfig
from rollout_dispatcher.service.durability.own_thread import in_own_thread
from rollout_dispatcher.service.reloading.reloads import Reloads

log = logging.getLogger(__name__)

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
            await self._read_and_apply(reloads)

    async def _read_and_apply(self, reloads: Reloads) -> None:
        try:
            found, access = await asyncio.wait_for(self._read_anew(), PATIENCE_SECONDS)
        except TimeoutError:
            hangs = f"the config file was not read within {PATIENCE_SECONDS:g} s: its disk hangs"
            reloads.refuse(ConfigError(hangs), BY)
            return
        except ConfigError as error:
            reloads.refuse(error, BY)
            return
        try:
            reloads.reread(found.config, found.sources, BY)
        except ConfigError:
            return  # it was logged and counted
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
