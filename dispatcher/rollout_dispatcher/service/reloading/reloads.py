"""Puts settings in force: all of a change or nothing, told to the log, the journal and metrics."""

import logging
from collections.abc import Callable, Iterable, Mapping

from rollout_dispatcher.core.facts import PostedSetting
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.service.config.options import ServeConfig
from rollout_dispatcher.service.reloading.settings import Settings

log = logging.getLogger(__name__)

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
            log.info("%s: %s, from the next plan on", by, ", ".join(map(str, changes)))
        if changes or old.posted != new.posted:
            self._apply(new)


def resume(settings: Settings, posted: Iterable[PostedSetting]) -> Settings:
    """With what was posted to an earlier process, as far as that still holds; the log says how."""
    before = tuple(posted)
    try:
        found = settings.resumed(before)
    except ConfigError as error:
        log.warning(
            "what was posted before the restart does not fit the options any more, which count: %s",
            "; ".join(error.problems),
        )
        return settings
    for setting in before:
        if setting.name in found.posted:
            log.info("%s is %s, as of %s", setting.name, setting.value, setting.by)
        else:
            log.info(
                "%s was %s as of %s, and its option has changed since: that counts",
                setting.name, setting.value, setting.by,
            )  # fmt: skip
    return found
