"""Opens the journal for the service: the core starts from it, metrics watch it.

Only here is the journal's own module imported, since LMDB is an optional dependency.
"""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_dispatcher.core.dispatch import Dispatch
from rollout_dispatcher.core.effects import SamplesDropped
from rollout_dispatcher.core.facts import Configured, GroupSizeSet, PostedSetting, Remembered
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.journal.policy import parse_sync
from rollout_dispatcher.service.config.options import ServeConfig
from rollout_dispatcher.service.durability.fits import fit
from rollout_dispatcher.service.metrics.registry import Metrics
from rollout_dispatcher.service.status.drops_log import DropsLog

if TYPE_CHECKING:
    from rollout_dispatcher.journal.journal import Journal

log = logging.getLogger(__name__)

#: What a start on the journal of a run that was over has to say.
OVER = "journal %s is of a run that %s. To begin another run give --journal-dir another directory"
IS_FINISHED = "its DP ranks have finished: it takes no samples, and stops once all have heard so"
WAS_FINISHED = "its DP ranks had finished: it goes on with what they left, and takes samples again"
HAS_ENDED = (
    "has ended (end_stream(), or POST /v1/stream/end): it takes no samples, and stops once what is "
    "left is trained on and all have heard so"
)


@dataclass(frozen=True, slots=True)
class Opened:
    """A journal, and what it remembers. created: its directory was not there."""

    journal: "Journal"
    memory: Remembered
    created: bool

    def let_go(self) -> None:
        """Nobody goes on from it now."""
        self.journal.close(0.0)


def read_journal(config: ServeConfig, clock: Callable[[], float]) -> Opened:
    """What the disk has to do with it, which takes a while and may be done by another thread.

    Raises ConfigError when LMDB is missing, JournalError when the directory cannot be used.
    """
    assert config.journal_dir is not None, "only a service that has a journal reads it"
    try:
        from rollout_dispatcher.journal.journal import Journal  # noqa: PLC0415 - optional dependency
    except ImportError as error:
        raise ConfigError(
            f"--journal-dir needs lmdb ({error}): pip install 'rollout-dispatcher[journal]'"
        ) from error
    created = not _is_there(config.journal_dir)
    offset = time.time() - clock()  # the core's clock starts anew with every boot
    journal, memory = Journal.open(
        config.journal_dir,
        parse_sync(config.journal_sync),
        to_wall=lambda at: at + offset,
        # The time of day may have been set back since: nothing has happened in the future.
        from_wall=lambda at: min(at - offset, clock()),
        id_horizon=config.sample_id_horizon,
        payload_bytes=config.buffer_memory,
    )
    return Opened(journal, memory, created)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # whoever uses it says what is wrong with it
        return False


def go_on_from(
    opened: Opened,
    config: ServeConfig,
    core: Dispatch,
    metrics: Metrics,
    clock: Callable[[], float],
    *,
    posted: tuple[PostedSetting, ...] = (),
) -> "Journal":
    """Have the core go on from what was read; a journal that it cannot go on from is let go of.

    posted: of the settings that were posted to earlier processes those that still hold.

    Raises ConfigError when the settings do not fit what is in the journal.
    """
    journal, memory = opened.journal, opened.memory
    with ExitStack() as undo:
        undo.callback(journal.close)
        fit(config, memory)
        if config.group_size != memory.group_size:
            journal.append([GroupSizeSet(config.group_size)], memory.totals)
        if posted != memory.posted:  # of what was posted some does not hold any more
            journal.append([Configured(posted)], memory.totals)
        restored = core.restore(memory, clock())
        if restored.facts:
            journal.append(restored.facts, restored.totals)
        for effect in restored.effects:
            if isinstance(effect, SamplesDropped):
                DropsLog().note(effect.dropped, clock())
        undo.pop_all()
    metrics.watch_journal(journal)
    _log_begin(opened, config, core.run_id)
    return journal


def _log_begin(opened: Opened, config: ServeConfig, run_id: str) -> None:
    """Say where the journal is, and whether anything was in it: a new one may be the wrong one."""
    assert config.journal_dir is not None, "it was read"
    memory, where = opened.memory, config.journal_dir.absolute()
    if not memory.run_id:
        how = "created, as it was not there" if opened.created else "empty"
        log.info("journal %s: %s; run %s begins", where, how, run_id)
        return
    log.info(
        "journal %s: run %s goes on at step %d: %d samples buffered, %d open steps, %d retained",
        where, run_id, memory.next_step, len(memory.entries), len(memory.steps),
        len(memory.retained),
    )  # fmt: skip
    if memory.finished or memory.was_finished or memory.ended:
        how = HAS_ENDED if memory.ended else WAS_FINISHED
        log.warning(OVER, where, IS_FINISHED if memory.finished else how)
