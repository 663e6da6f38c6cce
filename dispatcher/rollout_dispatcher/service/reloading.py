"""Options that change while serving.

They are read again at SIGHUP, and checked as at start. Invariant: all changes are applied, or none.
"""

import logging
from collections.abc import Callable, Mapping

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.service.config.serve import ServeConfig

log = logging.getLogger(__name__)

#: Options that may change; any other needs a restart.
RELOADABLE = ("window", "max_wait", "max_imbalance", "max_delay")
#: Outcomes, as metrics count them.
CHANGED, UNCHANGED, REFUSED = OUTCOMES = ("changed", "unchanged", "refused")


class Reloads:
    """The options of one running dispatcher, as they were read last.

    apply: puts changed options in force. count: called with each outcome.
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
        """Apply what was read again. sources: by option, where it is set.

        Raises ConfigError if an option has changed that needs a restart; nothing has changed then.
        """
        before, after = self.config, config
        fixed = [
            f"{name} needs a restart ({getattr(before, name)} -> {getattr(after, name)}, "
            f"{sources.get(name, 'default')})"
            for name in ServeConfig.model_fields
            if name not in RELOADABLE and getattr(before, name) != getattr(after, name)
        ]
        if fixed:
            raise ConfigError(*fixed)
        pairs = {name: (getattr(before, name), getattr(after, name)) for name in RELOADABLE}
        # Plans use this bound, which follows from other options.
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
        """Log and count options that were refused."""
        self._count(REFUSED)
        log.warning(
            "SIGHUP: nothing changes: %s", "; ".join(error.problems),
            extra={"event": "settings-refused"},
        )  # fmt: skip
