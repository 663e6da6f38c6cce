"""How much of committed steps the journal may keep until a checkpoint covers them.

It is `--retain-bytes`, by default a tenth of the volume and at most 50 GiB, and never more than
half of what the volume has for the journal: retained steps give way before a disk is full, and
where it is full all the same (a quota, others' files) half of them go with each look.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from rollout_dispatcher.core.dispatch import Dispatch
from rollout_dispatcher.core.effects import Decision
from rollout_dispatcher.errors import JournalFull
from rollout_dispatcher.service.config.options import ServeConfig

if TYPE_CHECKING:
    from rollout_dispatcher.journal.journal import Journal

VOLUME_SHARE, MOST_BYTES = 10, 50 * 2**30
LOOK_EVERY_SECONDS = 1.0


class Retention:
    """Tells one core, which performs nothing itself."""

    def __init__(
        self,
        config: ServeConfig,
        core: Dispatch,
        journal: "Journal",
        perform: Callable[[Decision], None],
    ) -> None:
        assert config.journal_dir is not None, "only a journal keeps steps"
        self._directory, self._asked = config.journal_dir, config.retain_bytes
        self._core, self._journal, self._perform = core, journal, perform
        self._look_at = 0.0
        self._limit: int | None = None

    def look(self, now: float) -> None:
        """Tell how much there may be, if it is time again and something has changed."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_SECONDS
        limit = self._most()
        if isinstance(self._journal.failure, JournalFull):
            limit = min(limit, self._core.retained_bytes // 2)
        if limit != self._limit:
            self._limit = limit
            self._perform(self._core.retain_at_most(limit))

    def _most(self) -> int:
        volume = os.statvfs(self._directory)
        whole, free = volume.f_blocks * volume.f_frsize, volume.f_bavail * volume.f_frsize
        asked = min(whole // VOLUME_SHARE, MOST_BYTES) if self._asked is None else self._asked
        return min(asked, (free + self._journal.statistics().nbytes) // 2)
