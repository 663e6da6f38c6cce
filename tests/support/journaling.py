"""A journal opened as the service opens it, for tests that have nobody else to wait for."""

from collections.abc import Callable

from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.journal.journal import Journal
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_dispatcher.service.journaling import read_journal, restore
from rollout_dispatcher.service.metrics.registry import Metrics


def open_journal(
    config: ServeConfig, core: DispatcherCore, metrics: Metrics, clock: Callable[[], float]
) -> Journal:
    """The journal of `--journal-dir`, with the core restored from it."""
    return restore(read_journal(config, clock), config, core, metrics, clock)
