"""The journal of the service: opened, checked against the options, restored, and bounded.

A sample that fits no micro-batch, or a group that fits no step, would end each start with an error
from the planner, or wait for ever. So options that do not fit what the journal holds are refused at
start, with a remedy, unless the option itself says what becomes of it (`--on-oversize drop`,
`--groups ignore`).

The journal retains `retain_bytes` of committed steps until a checkpoint covers them, by default a
tenth of the volume and at most 50 GiB, and never more than half of the room on the volume. If the
disk is full all the same (a quota, others' files), each refresh deletes half of them.
"""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import Decision, SamplesDropped
from rollout_dispatcher.core.facts import GroupSizeSet, RecoveredState
from rollout_dispatcher.errors import ConfigError, JournalFull
from rollout_dispatcher.journal.journal import Journal
from rollout_dispatcher.journal.policy import parse_sync
from rollout_dispatcher.payload import Reference
from rollout_dispatcher.service.config.serve import ServeConfig, core_config
from rollout_dispatcher.service.metrics.registry import Metrics
from rollout_dispatcher.service.reporter import DropsLog
from rollout_planner.types import Grouping, Oversize, round_up

log = logging.getLogger(__name__)


def fit(config: ServeConfig, memory: RecoveredState) -> None:
    """Fit restored state to these options.

    Raises ConfigError if they cannot train on a part of it.
    """
    _check_lengths(config, memory)
    _check_blocks(config, memory)
    _check_fields(config, memory)
    _check_stores(config, memory)
    if config.groups is Grouping.IGNORE:
        for entry in (*memory.entries, *_in_steps(memory)):
            entry.group = -1
    else:
        groups = _groups(memory.entries)
        _check_accepted_in_groups(config, memory.entries)
        _check_sizes(config, groups)
        _check_micro_batches(config, groups)
        _check_open_groups(config, groups, memory.group_size)


def _check_lengths(config: ServeConfig, memory: RecoveredState) -> None:
    """Check buffered samples against the token budget; open steps keep their samples anyway."""
    budget = config.longest_in_budget
    if budget is None or config.on_oversize is not Oversize.ERROR:
        return
    longer = [entry.sample for entry in memory.entries if entry.sample.tokens > budget]
    if not longer:
        return
    longest = max(longer, key=lambda sample: sample.tokens)
    needed = round_up(longest.tokens, config.sample_length_multiple)
    raise ConfigError(
        f"{_held(config, len(longer))} longer than --micro-batch-tokens "
        f"{config.micro_batch_tokens}, the longest ({longest.sample_id}) has {longest.tokens} "
        f"tokens: start with --micro-batch-tokens {needed} or more until they are trained on, or "
        "with --on-oversize alone or drop"
    )


def _check_blocks(config: ServeConfig, memory: RecoveredState) -> None:
    """Check the blocks of open steps, which are delivered as planned."""
    steps = (*memory.steps, *memory.retained)
    most = max((size for step in steps for rank in step.cp_sizes for size in rank), default=1)
    if most > config.max_split:
        raise ConfigError(
            f"the journal has steps with samples that {most} DP ranks train together, and "
            f"max-split is {config.max_split}: start with --set max-split={most} until they are "
            "trained on"
        )


def _check_fields(config: ServeConfig, memory: RecoveredState) -> None:
    """Check the fields of all samples, once a step was planned.

    Before that the first push may have been a mistake: the core drops samples with other fields.
    """
    declared = config.declared_schema
    if declared is None or memory.next_step == 0:
        return
    samples = [entry.sample for entry in (*memory.entries, *_in_steps(memory))]
    others = [sample for sample in samples if sample.schema != declared]
    if others:
        raise ConfigError(
            f"{_held(config, len(others))} with other fields than --fields says, such as "
            f"{others[0].sample_id} ({declared.difference(others[0].schema)}): start without "
            "--fields until they are trained on"
        )


def _check_stores(config: ServeConfig, memory: RecoveredState) -> None:
    """Check that clients may open every payload store in use."""
    payloads = [entry.sample.payload for entry in (*memory.entries, *_in_steps(memory))]
    stores = [payload.stored.store for payload in payloads if isinstance(payload, Reference)]
    if lacking := sorted({*stores} - {*config.payload_stores}):
        count = sum(map(stores.count, lacking))
        raise ConfigError(
            f"{_held(config, count)} whose payloads lie in {', '.join(lacking)}, which no rank may "
            "open: start with --payload-stores "
            f"{' --payload-stores '.join([*config.payload_stores, *lacking])} until they are "
            "trained on"
        )
    left = [stored.store for stored in memory.unneeded]
    if lacking := sorted({*left} - {*config.payload_stores}):
        count = sum(map(left.count, lacking))
        raise ConfigError(
            f"the journal {config.journal_dir} has {count} object{'s' * (count > 1)} to be "
            f"released in {', '.join(lacking)}, which no worker may open: start with "
            f"--payload-stores {' --payload-stores '.join([*config.payload_stores, *lacking])} "
            "until they are"
        )


def _check_accepted_in_groups(config: ServeConfig, entries: Iterable[Entry]) -> None:
    """Check samples that were accepted one by one: a part of their group may have been trained."""
    samples = [entry.sample for entry in entries if entry.group < 0]
    apart = [it for it in samples if it.group_id is not None and it.group_size != 1]
    if apart:
        raise ConfigError(
            f"{_held(config, len(apart))} accepted under --groups ignore, whose groups (such as "
            f"{apart[0].group_id}) may have been trained on in part; start with --groups ignore "
            f"until they are trained on, instead of --groups {config.groups}"
        )


def _check_sizes(config: ServeConfig, groups: list[list[Entry]]) -> None:
    batch = config.batch
    larger = [group for group in groups if _size(group) > batch]
    if larger and not config.by_groups:
        largest = max(larger, key=_size)
        raise ConfigError(
            f"{_held(config, sum(map(len, larger)))} in groups that are larger than "
            f"--global-batch-size {batch}, the largest ({largest[0].sample.group_id}) has "
            f"{_size(largest)}: start with --global-batch-size {_size(largest)} or more until "
            "they are trained on, with --global-batch-groups, or with --groups ignore"
        )


def _check_micro_batches(config: ServeConfig, groups: list[list[Entry]]) -> None:
    """Check that groups that have to stay in one micro-batch fit one."""
    limits = core_config(config).limits.micro_batch
    m = limits.samples
    large = [group for group in groups if m is not None and _size(group) > m]
    if not limits.drops:
        large += [group for group in groups if limits.too_long(entry.sample for entry in group)]
    if large:
        raise ConfigError(
            f"{_held(config, sum(map(len, large)))} in groups that are larger than a micro-batch, "
            f"such as {large[0][0].sample.group_id}: start with --groups step or rank until they "
            "are trained on, instead of --groups micro-batch, or with larger micro-batches"
        )


def _check_open_groups(config: ServeConfig, groups: list[list[Entry]], before: int | None) -> None:
    """Check open groups of the default size, as later members would have another one.

    before: the default of the members so far.
    """
    now = config.group_size
    cut = [group for group in groups if len(group) < _declared(group) == before]
    if cut and now != before:
        raise ConfigError(
            f"{_held(config, sum(map(len, cut)))} in groups that lack members and have "
            f"--group-size {before}, such as {cut[0][0].sample.group_id}: start with --group-size "
            f"{before} until they are complete, instead of {'none' if now is None else now}"
        )


def _groups(entries: Iterable[Entry]) -> list[list[Entry]]:
    groups: dict[int, list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.group >= 0:
            groups[entry.group].append(entry)
    return list(groups.values())


def _declared(group: list[Entry]) -> int:
    """Return the size that its members declare; below 1 if none does."""
    return max(entry.sample.group_size for entry in group)


def _size(group: list[Entry]) -> int:
    return max(_declared(group), len(group))


def _in_steps(memory: RecoveredState) -> Iterator[Entry]:
    steps = (*memory.steps, *memory.retained)
    parts = (part for step in steps for rank in step.micro_batches for part in rank)
    return (entry for part in parts for entry in part)


def _held(config: ServeConfig, count: int) -> str:
    return f"the journal {config.journal_dir} has {count} sample{'s' * (count > 1)}"


VOLUME_SHARE, MOST_BYTES = 10, 50 * 2**30
REFRESH_SECONDS = 1.0


class Retention:
    """Bounds the bytes of retained steps of one core."""

    def __init__(
        self,
        config: ServeConfig,
        core: DispatcherCore,
        journal: "Journal",
        perform: Callable[[Decision], None],
    ) -> None:
        assert config.journal_dir is not None, "only a journal keeps steps"
        self._directory, self._asked = config.journal_dir, config.retain_bytes
        self._core, self._journal, self._perform = core, journal, perform
        self._refresh_at = 0.0
        self._limit: int | None = None

    def refresh(self, now: float) -> None:
        """Set the core's bound, if it is due and has changed."""
        if now < self._refresh_at:
            return
        self._refresh_at = now + REFRESH_SECONDS
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


#: Logged at a start on the journal of a run that was over.
OVER = "journal %s is of a run that %s. To begin another run give --journal-dir another directory"
IS_FINISHED = (
    "its DP ranks have finished: it takes no samples, and stops once all clients are notified"
)
WAS_FINISHED = "its DP ranks had finished: it goes on with what they left, and takes samples again"
HAS_ENDED = (
    "has ended (end_stream(), or POST /v1/stream/end): it takes no samples, and stops once what is "
    "left is trained on and all clients are notified"
)


@dataclass(frozen=True, slots=True)
class Opened:
    """A journal and its restored state. created: its directory did not exist."""

    journal: Journal
    memory: RecoveredState
    created: bool


def read_journal(config: ServeConfig, clock: Callable[[], float]) -> Opened:
    """Open and read the journal, which takes a while; may run in another thread.

    Raises JournalError if the directory cannot be used.
    """
    assert config.journal_dir is not None, "only a service that has a journal reads it"
    created = not os.access(config.journal_dir, os.F_OK)
    offset = time.time() - clock()  # the core's clock starts anew with every boot
    journal, memory = Journal.open(
        config.journal_dir,
        parse_sync(config.journal_sync),
        to_wall=lambda at: at + offset,
        # The time of day may have been set back since; no time lies in the future.
        from_wall=lambda at: min(at - offset, clock()),
        id_horizon=config.sample_id_horizon,
        payload_bytes=config.buffer_memory,
    )
    return Opened(journal, memory, created)


def restore(
    opened: Opened,
    config: ServeConfig,
    core: DispatcherCore,
    metrics: Metrics,
    clock: Callable[[], float],
) -> "Journal":
    """Restore the core's state, and return the journal.

    Raises ConfigError, with the journal closed, if the options do not fit it.
    """
    journal, memory = opened.journal, opened.memory
    with ExitStack() as undo:
        undo.callback(journal.close)
        fit(config, memory)
        if config.group_size != memory.group_size:
            journal.append([GroupSizeSet(config.group_size)], memory.totals)
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
    """Log where the journal is and whether it was empty: a new one may be the wrong one."""
    assert config.journal_dir is not None, "it was read"
    memory, where = opened.memory, config.journal_dir.absolute()
    if not memory.run_id:
        how = "created, as it was not there" if opened.created else "empty"
        fields = {"event": "journal-empty", "run_id": run_id}
        log.info("journal %s: %s; run %s begins", where, how, run_id, extra=fields)
        return
    log.info(
        "journal %s: run %s goes on at step %d: %d samples buffered, %d open steps, %d retained",
        where, run_id, memory.next_step, len(memory.entries), len(memory.steps),
        len(memory.retained),
        extra={"event": "journal-restored", "run_id": run_id, "step": memory.next_step},
    )  # fmt: skip
    if memory.finished or memory.was_finished or memory.ended:
        how = HAS_ENDED if memory.ended else WAS_FINISHED
        fields = {"event": "run-over", "run_id": run_id}
        log.warning(OVER, where, IS_FINISHED if memory.finished else how, extra=fields)
