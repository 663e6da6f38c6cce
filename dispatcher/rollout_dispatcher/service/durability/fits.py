"""Whether what an earlier process left in the journal fits the settings of this one.

A sample that no micro-batch holds, or a group that no step holds, would end each start with an
error from the planner, or wait for ever. So the settings are refused at once, with what to change.
What a setting itself decides of (`--oversize drop`, `--groups ignore`) is no reason to refuse:
groups that are ignored now are none any more.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.facts import Remembered
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.payload import Reference
from rollout_dispatcher.service.config.core import core_config
from rollout_dispatcher.service.config.options import ServeConfig
from rollout_planner.types import Grouping, Oversize, round_up


def fit(config: ServeConfig, memory: Remembered) -> None:
    """Make what is remembered fit these settings.

    Raises ConfigError if there is something in it that they cannot train on.
    """
    _check_lengths(config, memory)
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


def _check_lengths(config: ServeConfig, memory: Remembered) -> None:
    """Buffered samples longer than the token budget have no micro-batch, unless they go alone.

    In open steps they do: these are planned again, if at all, with exactly their samples.
    """
    budget = config.longest_in_budget
    if budget is None or config.oversize is not Oversize.ERROR:
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
        "with --oversize alone or drop"
    )


def _check_fields(config: ServeConfig, memory: Remembered) -> None:
    """Once a step was planned, its samples and those that wait keep the run's fields.

    Before that the first push may have been a mistake: the core drops what has other fields than
    are declared now.
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


def _check_stores(config: ServeConfig, memory: Remembered) -> None:
    """Nobody opens other payload stores than those that are told of, to fetch or to release."""
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
    """Of a group whose samples were accepted one by one, any number may have left already."""
    apart = [entry.sample for entry in entries if entry.group < 0 and _has_company(entry)]
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
            f"--dispatch-batch-size {batch}, the largest ({largest[0].sample.group_id}) has "
            f"{_size(largest)}: start with --dispatch-batch-size {_size(largest)} or more until "
            "they are trained on, with --dispatch-batch-groups, or with --groups ignore"
        )


def _check_micro_batches(config: ServeConfig, groups: list[list[Entry]]) -> None:
    """Groups that have to stay in one micro-batch fit one."""
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
    """Members still to come that do not say would get the new size, and be refused.

    before: the size that those which are here got, unless they said one.
    """
    now = config.group_size
    cut = [group for group in groups if len(group) < _said(group) == before]
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


def _said(group: list[Entry]) -> int:
    """The size that its members say, below 1 while nobody knows."""
    return max(entry.sample.group_size for entry in group)


def _size(group: list[Entry]) -> int:
    return max(_said(group), len(group))


def _has_company(entry: Entry) -> bool:
    return entry.sample.group_id is not None and entry.sample.group_size != 1


def _in_steps(memory: Remembered) -> Iterator[Entry]:
    steps = (*memory.steps, *memory.retained)
    parts = (part for step in steps for rank in step.micro_batches for part in rank)
    return (entry for part in parts for entry in part)


def _held(config: ServeConfig, count: int) -> str:
    return f"the journal {config.journal_dir} has {count} sample{'s' * (count > 1)}"
