"""Checks of settings against each other, and of clients against the settings.

Each problem has cause and remedy. Invariant: a check that depends on an option known to be wrong is
skipped, so one mistake is reported once.
"""

import logging
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from rollout_dispatcher.errors import ConfigError, ProtocolError, RankRefused
from rollout_dispatcher.hints import renamed_in
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.service.config.options import SelectionOptions, StepOptions
from rollout_dispatcher.service.config.values import Retain, schema_of
from rollout_planner.errors import problems as plan_problems
from rollout_planner.strategies import looks_ahead
from rollout_planner.types import Grouping, Layout, Oversize, Sync, round_up

if TYPE_CHECKING:
    from rollout_dispatcher.service.config.serve import ServeConfig

log = logging.getLogger(__name__)


def check_padding(config: "ServeConfig", packed_length: int | None) -> None:
    """Raise RankRefused for a DP rank whose `packed_length` is too small."""
    most, why = largest_micro_batch(config)
    if packed_length is not None and packed_length < most:
        raise RankRefused(
            f"micro-batches are to be padded to packed_length={packed_length} tokens, and may have "
            f"{most} ({why}); make the stream with packed_length={most} or more, or lower that"
        )


def largest_micro_batch(config: "ServeConfig") -> tuple[int, str]:
    """Most tokens of a packed micro-batch, padding included, and the settings behind it."""
    budget, limit = config.micro_batch_tokens, f"--set max-sample-tokens={config.max_sample_tokens}"
    longest = round_up(config.max_sample_tokens, config.sample_length_multiple)
    if budget is None:
        size = config.micro_batch_size or 1
        return size * longest, f"--micro-batch-size {size} and {limit}"
    if config.on_oversize is Oversize.ALONE and longest > budget:
        return longest, f"--on-oversize alone and {limit}"
    return budget, f"--micro-batch-tokens {budget}"


def check_rank(config: "ServeConfig", *, opens_stores: bool, max_split: int = 1) -> None:
    """Raise RankRefused for a DP rank that cannot fetch or train samples that it may get."""
    if max_split < config.max_split:
        raise RankRefused(
            f"samples are planned for up to {config.max_split} DP ranks together (--set "
            f"max-split), and this rank takes part in up to {max_split}; make the stream with "
            f"max_split={config.max_split}, for a model whose attention runs over "
            f"micro_batch.cp_group, or start the dispatcher with --set max-split={max_split}"
        )
    if config.payload_stores and not opens_stores:
        raise RankRefused(
            "samples may lie in payload stores, from which this rank does not fetch them "
            "(`opens_stores` of its hello); start the dispatcher without --payload-stores"
        )


def warn_if_unknown(config: "ServeConfig") -> None:
    """Log a warning for a payload store of a scheme that is not installed here."""
    for address in config.payload_stores:
        if scheme := unknown_scheme(address):
            log.warning(
                "--payload-stores names %s, and no store of the scheme %s is installed here (known "
                "are %s): it has to be where producers and DP ranks run, or samples go through the "
                "dispatcher, and references into it are resolved by nobody",
                address, scheme, ", ".join(OUR_SCHEMES),
                extra={"event": "store-unknown"},
            )  # fmt: skip


def check_push(push: m.Push, *, opens_stores: bool) -> None:
    """Raise ProtocolError for references of a producer that does not get their releases."""
    if push.objects is not None and not opens_stores:
        raise ProtocolError("samples that lie in payload stores need `opens_stores` in the hello")


#: Schemes of the built-in payload stores.
OUR_SCHEMES = ("file", "mooncake", "ray", "transferqueue")
Check = Callable[["ServeConfig"], Iterator[str]]

#: Exactly one option of each pair has to be set.
_ONE_OF = {
    ("global_batch_size", "global_batch_groups"): "a step has a number of samples or of groups",
    ("micro_batch_size", "micro_batch_tokens"): "a micro-batch has a fixed size or a token budget",
}
_BATCH = frozenset({"global_batch_size", "global_batch_groups"})
_PLAN = _BATCH | StepOptions.model_fields.keys() | SelectionOptions.model_fields.keys()


def problems(config: "ServeConfig", wrong: frozenset[str] = frozenset()) -> Iterator[str]:
    """Problems of these settings together. wrong: options with problems of their own."""
    for pair, meaning in _ONE_OF.items():
        given = [name for name in pair if getattr(config, name) is not None]
        if not wrong.isdisjoint(pair) or len(given) == 1:
            continue
        wrong |= set(pair)
        one, other = (f"--{name.replace('_', '-')}" for name in pair)
        found = "both are" if given else "neither is"
        yield f"{meaning}, and {found} set; set exactly one of {one} and {other}"
    for options, check in CHECKS:
        if not wrong & options:
            yield from check(config)


def notes(config: "ServeConfig") -> Iterator[str]:
    """Notes on settings without use: a split or a window that cannot help."""
    single, padded = config.micro_batch_size == 1, config.layout is Layout.PADDED
    wide, ahead = config.window > 1, looks_ahead(config.strategy)
    chooses = wide and ahead and config.max_split == 1
    if wide and config.max_split > 1:
        yield (
            f"--set max-split={config.max_split} takes the oldest samples and splits the long "
            f"ones, so a window of {config.window:g} is not chosen from; set --window 1"
        )
    elif wide and not ahead:
        yield (
            f"--strategy {config.strategy} takes the oldest samples, so a window of "
            f"{config.window:g} is waited for and not chosen from; set "
            "--window 1, or --strategy window"
        )
    if config.max_split > 1 and config.sync is Sync.STEP and config.micro_batch_order is not None:
        yield (
            f"--set micro-batch-order={config.micro_batch_order} is not heeded with --sync step "
            "and --set max-split: there the micro-steps with blocks come first; leave it out, or "
            "set --sync micro-step"
        )
    if config.dp_size == 1 and (single or not padded):
        remedy = "; --window 1 holds no sample back" if chooses else ""
        yield f"one DP rank waits for no other, so neither split nor window saves time{remedy}"
    elif config.global_batch_size is not None and config.global_batch_size <= config.dp_size:
        window = "only the window, by choosing samples that are alike"
        yield (
            f"a step of {config.global_batch_size} samples has one for each of {config.dp_size} "
            f"DP ranks at most: no split helps, {window if chooses else 'and no window is set'}"
        )
    if padded and single:
        yield "micro-batches of one sample are not padded: --layout padded is as packed here"


def _counted_groups(config: "ServeConfig") -> Iterator[str]:
    if config.by_groups and config.groups is Grouping.IGNORE:
        yield (
            "--global-batch-groups counts groups, and --groups ignore knows none; set "
            "--global-batch-size, or --groups step"
        )


def _fields(config: "ServeConfig") -> Iterator[str]:
    try:
        schema_of(config.fields)
    except ValueError as error:
        yield f"--fields: {error}"


def _plan(config: "ServeConfig") -> Iterator[str]:
    try:
        plan_config = config.plan_config()
    except ConfigError as error:
        yield from error.problems
        return
    yield from map(renamed_in, plan_problems(plan_config, config.window))


def _buffer(config: "ServeConfig") -> Iterator[str]:
    window = config.window_samples
    if config.buffer_samples < window:
        yield (
            f"--buffer-capacity {config.buffer_capacity} is smaller than the window of {window} "
            f"samples, which could never fill; raise it to {window} or lower --window"
        )


def _groups(config: "ServeConfig") -> Iterator[str]:
    batch, size, m = config.batch, config.group_size, config.micro_batch_size
    if config.groups is Grouping.MICRO_BATCH and m is not None and (size or 1) > m:
        yield (
            f"--groups micro-batch keeps the {size} samples of a group in one micro-batch, and "
            f"--micro-batch-size is {m}; raise it to {size} or more, or set --groups rank"
        )
    if size is None or config.by_groups or config.groups is Grouping.IGNORE or batch % size == 0:
        return
    below, above = batch // size * size, -(-batch // size) * size
    yield (
        f"groups of {size} samples stay whole, so they never fill a dispatch batch of {batch}; "
        f"set --global-batch-size {f'{below} or {above}' if below else above}, or "
        "--groups ignore"
    )


def _deadlines(config: "ServeConfig") -> Iterator[str]:
    timeouts = {"--rank-timeout": config.rank_timeout, "--set idle-timeout": config.idle_timeout}
    for flag, timeout in timeouts.items():
        if timeout <= 2 * config.heartbeat_interval:
            yield (
                f"{flag} must exceed two heartbeats, or one late one "
                "ends a healthy connection; raise it or lower --set heartbeat-interval"
            )


def _retain(config: "ServeConfig") -> Iterator[str]:
    if config.sample_retention is Retain.CHECKPOINT and config.journal_dir is None:
        yield (
            "--sample-retention checkpoint keeps the samples of committed steps in the journal; "
            "set --journal-dir, or take --sample-retention commit"
        )
    if config.retain_bytes is not None and not config.retains:
        yield (
            "--set retain-bytes bounds what the journal keeps of committed steps, and nothing is "
            "kept; set --journal-dir, and leave out --sample-retention commit"
        )


def _stores(config: "ServeConfig") -> Iterator[str]:
    stores = config.payload_stores
    if stores and config.journal_dir is None:
        yield (
            "what lies in --payload-stores outlives a dispatcher that crashes, and only a journal "
            "knows then what is still needed; set --journal-dir, or leave --payload-stores out"
        )
    if twice := next((address for address in stores if stores.count(address) > 1), None):
        yield f"--payload-stores names {twice} twice; name it once"
    for address in stores:
        scheme = unknown_scheme(address)
        if meant := _scheme_meant(scheme):
            yield (
                f"--payload-stores names {address}, and no client would know what {scheme} is: did "
                f"you mean {meant}? A store of your own whose scheme that is has to be installed "
                "here too"
            )


def unknown_scheme(address: str) -> str | None:
    """The scheme of a payload store's address, if no store of that scheme is installed here.

    The distribution of a store has to be installed where producers and DP ranks run, not here.
    """
    scheme = address.partition(":")[0]
    installed = entry_points(group="rollout_dispatcher.payload_stores")
    return None if scheme in OUR_SCHEMES or scheme in installed.names else scheme


def _scheme_meant(scheme: str | None) -> str | None:
    """The built-in scheme that is misspelt here, if one is near."""
    meant = get_close_matches(scheme or "", OUR_SCHEMES, n=1, cutoff=0.66)
    return next(iter(meant), None)


def _access(config: "ServeConfig") -> Iterator[str]:
    try:
        config.access()
    except ConfigError as error:
        yield from error.problems


#: The options that a check depends on, and the check.
CHECKS: tuple[tuple[frozenset[str], Check], ...] = (
    (frozenset({"global_batch_groups", "groups"}), _counted_groups),
    (frozenset({"fields"}), _fields),
    (_PLAN | {"window", "groups"}, _plan),
    (_BATCH | {"window", "buffer_capacity"}, _buffer),
    (_BATCH | {"groups", "group_size", "micro_batch_size"}, _groups),
    (frozenset({"rank_timeout", "idle_timeout", "heartbeat_interval"}), _deadlines),
    (frozenset({"sample_retention", "retain_bytes", "journal_dir"}), _retain),
    (frozenset({"payload_stores", "journal_dir"}), _stores),
    (
        frozenset({
            "listen", "http", "token_file", "producer_token_file", "tls_cert", "tls_key",
            "tls_client_ca", "insecure",
        }),
        _access,
    ),
)  # fmt: skip
