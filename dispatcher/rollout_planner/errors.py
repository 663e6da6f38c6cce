"""The planner's errors, the base of every error of this distribution, and the check of a config.

Invariant: a config that passes can plan every window whose samples fit its token budget.
"""

import math
from collections.abc import Iterator
from typing import ClassVar, Final

from rollout_planner.types import Grouping, Layout, PlanConfig, Strategy, round_up


class DispatcherError(Exception):
    """Base of the tree."""

    code: ClassVar[str] = "error"
    retriable: ClassVar[bool] = False


class ConfigError(DispatcherError):
    """Settings contradict each other or cannot be satisfied.

    problems: each thing that is wrong, in a line of its own.
    """

    code = "config"

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class PlanError(DispatcherError, ValueError):
    """A window cannot be planned as asked.

    Also a ValueError: planning is called by trainers that know nothing of this tree.
    """

    code = "plan"


_LONGER_BUDGET = "raise --micro-batch-tokens, truncate the rollout, or set --on-oversize alone"
_ROOM_FOR_GROUPS = "raise --micro-batch-tokens, set --on-oversize alone, or --groups rank"


class SampleTooLong(PlanError):
    """A sample has more tokens than one micro-batch may hold."""

    code = "too-long"

    def __init__(self, tokens: int, budget: int, remedy: str = _LONGER_BUDGET) -> None:
        super().__init__(
            f"a sample of {tokens} tokens exceeds the micro-batch budget of {budget} tokens; "
            + remedy
        )
        self.tokens, self.budget = tokens, budget


class UnequalPartitions(PlanError, AssertionError):
    """Numbers cannot be split as asked, or are no lengths or costs.

    Also an AssertionError, which is what callers of verl's functions of the same names expect.
    """

    code = "unequal-partitions"


class GroupTooLong(PlanError):
    """A group has more tokens than the one micro-batch that it has to stay in may hold."""

    code = "group-too-long"

    def __init__(
        self, samples: int, tokens: int, budget: int, remedy: str = _ROOM_FOR_GROUPS
    ) -> None:
        super().__init__(
            f"a group of {samples} samples has {tokens} tokens, which exceeds the micro-batch "
            f"budget of {budget} tokens that it has to stay in; {remedy}"
        )
        self.samples, self.tokens, self.budget = samples, tokens, budget


#: Each costs a rank a forward and backward pass for nothing: more are a mistake, which would take a
#: while to plan, or all memory.
MOST_FILLERS: Final = 2**16
_AT_LEAST_ONE = (
    "dp_size", "dispatch_batch_size", "micro_batch_multiple", "min_micro_batches",
    "sample_length_multiple", "pipeline_stages", "micro_batch_size", "micro_batch_tokens",
)  # fmt: skip


def validate_config(config: PlanConfig, window_multiple: float = 1.0) -> None:
    """Raise ConfigError, with what to change, if settings contradict each other.

    window_multiple: size of the window in dispatch batches; it bounds `max_skips` from below.
    """
    if (first := next(problems(config, window_multiple), None)) is not None:
        raise ConfigError(first)


def problems(config: PlanConfig, window_multiple: float = 1.0) -> Iterator[str]:
    """Everything that is wrong with these settings together, and what to change."""
    m, budget = config.micro_batch_size, config.micro_batch_tokens
    asked = {name: getattr(config, name) for name in _AT_LEAST_ONE}
    low = [name for name, value in asked.items() if value is not None and value < 1]
    yield from (f"{name} is {asked[name]}; it must be at least 1" for name in low)
    if (m is None) == (budget is None):
        found = "neither is" if m is None else "both are"
        yield (
            f"a micro-batch has a fixed size or a token budget, and {found} set; "
            "set exactly one of micro_batch_size and micro_batch_tokens"
        )
    elif not low:
        yield from _sizes(config)
    yield from _skips(config, window_multiple)
    yield from _splits(config)
    if config.pads_to_budget and config.grouping is Grouping.MICRO_BATCH:
        yield (
            "groups that stay in one micro-batch cannot share a budget of padded tokens; "
            "set micro_batch_size, or layout packed, or grouping rank"
        )


def _splits(config: PlanConfig) -> Iterator[str]:
    most, ranks = config.max_split, config.dp_size
    if most < 1 or most & (most - 1):
        yield f"max_split is {most}; ranks share a sample by twos: use 1, 2, 4, 8 ..."
    elif most > max(ranks, 1):
        yield (
            f"max_split is {most}, and there are {ranks} DP ranks; lower it to "
            f"{1 << (ranks.bit_length() - 1)}, or use {most} ranks or more"
        )
    cannot = {
        "no micro_batch_tokens": config.micro_batch_tokens is None,
        "layout padded": config.layout is not Layout.PACKED,
        f"groups {config.grouping}": config.grouping in (Grouping.RANK, Grouping.MICRO_BATCH),
        f"strategy {config.strategy}": config.strategy is not Strategy.WINDOW,
        f"pipeline_stages {config.pipeline_stages}": config.pipeline_stages > 1,
        f"rank_tokens {config.rank_tokens}": config.rank_tokens is not None,
    }
    if most > 1 and (found := [what for what, is_so in cannot.items() if is_so]):
        yield (
            f"max_split {most} shares a packed sample out over ranks, under micro_batch_tokens and "
            f"by strategy window, and there is {', '.join(found)}, which it cannot heed; change "
            "that, or set max_split to 1"
        )


def too_many_fillers(
    micro_batches: int, samples: int, asked_by: str, named: str | None = None
) -> str | None:
    """What is wrong with a number of micro-batches that nobody can mean; None: they are few enough.

    asked_by: the options or arguments that ask for them. named: the one that says how many samples
    there are.
    """
    if micro_batches - samples <= MOST_FILLERS:
        return None
    return (
        f"{asked_by} make {micro_batches} micro-batches of {named or f'{samples} samples'}, and "
        f"all others would be fillers, of which a step has at most {MOST_FILLERS}; lower them"
    )


def _sizes(config: PlanConfig) -> Iterator[str]:
    budget, multiple = config.micro_batch_tokens, config.sample_length_multiple
    if budget is not None and budget < multiple:
        yield (
            f"micro_batch_tokens is {budget}, and every sample is padded to a multiple of "
            f"{multiple} tokens, so none would fit; raise it to "
            f"{multiple} or more, or lower sample_length_multiple"
        )
    least = budget or multiple
    if config.rank_tokens is not None and config.rank_tokens < least:
        yield (
            f"rank_tokens is {config.rank_tokens}, and one micro-batch may have {least}; raise it "
            f"to {least} or more, or lower micro_batch_tokens"
        )
    if config.micro_batch_size is not None and not config.by_groups:
        yield from _full_micro_batches(config, config.micro_batch_size)
        return
    B, asked = config.dispatch_batch_size, config.dp_size * config.micro_batches(1)
    asked_by = (
        f"dp_size {config.dp_size}, min_micro_batches {config.min_micro_batches} and "
        f"micro_batch_multiple {config.micro_batch_multiple}"
    )
    if found := too_many_fillers(asked, B, asked_by, f"dispatch_batch_size {B}"):
        yield found


def _full_micro_batches(config: PlanConfig, m: int) -> Iterator[str]:
    """Of a fixed size, so that micro-batches are full whenever the batch is."""
    R, B, multiple = config.dp_size, config.dispatch_batch_size, config.micro_batch_multiple
    unit, M, least = R * m * multiple, B // (R * m), config.min_micro_batches
    if B % unit:
        below = B // unit * unit
        near = f"{below} or {below + unit}" if below else f"{unit}"
        if sizes := _sizes_near(R, B, m * multiple):
            near += f", or dp_size {sizes}"
        yield (
            f"dispatch_batch_size {B} is not a multiple of {unit} = dp_size {R}"
            f" x micro_batch_size {m}"
            + (f" x micro_batch_multiple {multiple}" if multiple > 1 else "")
            + f"; use {near}"
        )
    elif least > M:
        yield (
            f"dispatch_batch_size {B} makes {M} micro-batches of micro_batch_size {m} for each of "
            f"{R} ranks, and min_micro_batches is {least}; use dispatch_batch_size "
            f"{R * m * round_up(least, multiple)} or more, a smaller micro_batch_size, or lower "
            f"min_micro_batches to {M}"
        )


def _sizes_near(dp_size: int, batch: int, per_rank: int) -> str:
    """The next smaller and larger number of ranks that a batch divides over, if it does at all."""
    if batch % per_rank:
        return ""
    parts = batch // per_rank
    below = next((R for R in range(min(dp_size, parts), 0, -1) if parts % R == 0), None)
    above = next((R for R in range(dp_size, parts + 1) if parts % R == 0), None)
    return " or ".join(str(R) for R in (below, above) if R is not None)


def _skips(config: PlanConfig, window_multiple: float) -> Iterator[str]:
    if not (math.isfinite(window_multiple) and window_multiple >= 1):
        yield f"window_multiple is {window_multiple}; it must be at least 1"
        return
    least = math.ceil(window_multiple) - 1
    bounds = (("max_skips", config.max_skips), ("outlier_max_skips", config.outlier_max_skips))
    for name, value in bounds:
        if value is not None and value < least:
            yield (
                f"{name} is {value}, but a window of {window_multiple} dispatch batches makes "
                f"samples wait for {least} dispatches; raise it to {least} or more, "
                "or make the window smaller"
            )
