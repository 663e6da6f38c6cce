"""The options of `dispatcher simulate`, each declared once.

For each row of the table, the options shared with `serve` build its `ServeConfig`, so a setting
that `serve` would reject is rejected here.
"""

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from rollout_dispatcher.cli.options import options_of
from rollout_dispatcher.cli.problems import ENV_PREFIX
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.record.recording import Recording
from rollout_dispatcher.service.config.options import SelectionOptions, StepOptions
from rollout_dispatcher.service.config.serve import ServeConfig, core_config
from rollout_dispatcher.service.config.values import (
    Duration,
    Multiple,
    NotNegative,
    Positive,
    Ratio,
    one_or_several,
)
from rollout_dispatcher.simulate.recorded import fitted_cost, trainer_load
from rollout_dispatcher.simulate.replay import Setting
from rollout_planner.strategies import looks_ahead
from rollout_planner.types import Grouping, Oversize, Strategy

#: Options of `serve` that take several values here.
_COMPARED = {"strategy", "window"}
#: Bounds of a measured --trainer-load; that of a short record may be far off.
_LEAST_LOAD, _MOST_LOAD = 0.01, 10.0


class Arrivals(StrEnum):
    """When samples arrive."""

    STEADY = "steady"
    TRACE = "trace"


class Format(StrEnum):
    """The format of standard output."""

    TABLE = "table"
    JSON = "json"


class SimulateOptions(SelectionOptions, StepOptions):
    """The settings of one simulation."""

    #: Headings of the help, each at the first option under it.
    HEADINGS: ClassVar[dict[str, str]] = {
        "dp_size": "steps",
        "cost": "planning",
        "window": "what is compared",
        "groups": "groups, and samples that are too long",
        "arrivals": "arrivals and length of the run",
        "format": "what is written",
    }

    cost: str = "quadratic:1,24576,0"
    """work of a sample of s tokens: tokens; quadratic:a,b,c,d for a*s*s + b*s + c, and d for each
    micro-batch; hf:PATH for a Hugging Face config.json"""
    global_batch_groups: Positive | None = None
    """groups in one step over all DP ranks, each whole, instead of --global-batch-size; --groups is
    step then, unless it is given"""
    group_size: Positive | None = None
    """samples of each group; a trace that names no groups has one of each so many consecutive
    samples, so lengths in it are independent; --groups is step then, unless it is given"""

    window: Annotated[
        tuple[Multiple, ...], BeforeValidator(one_or_several), Field(min_length=1)
    ] = (1.0, 1.25, 1.5, 2.0)
    """windows to try, in dispatch batches, as many as you like: 1 1.25 2"""
    strategy: Annotated[
        tuple[Strategy, ...], BeforeValidator(one_or_several), Field(min_length=1)
    ] = tuple(Strategy)
    """strategies to choose and split steps, as many as you like; all but window take the oldest
    samples, so they are run once, at a window of 1"""

    max_split: Positive = 1
    """show also the row split N: up to N DP ranks, 2, 4, 8 ..., train a sample together (context
    parallelism), and the oldest samples are taken; its excess has what splitting costs; 1: no such
    row"""

    groups: Grouping = Grouping.IGNORE
    """unit that keeps a group whole: ignore (none; not all traces' groups are of one policy), step,
    rank, micro-batch"""
    on_oversize: Oversize = Oversize.ALONE
    """action for a sample longer than --micro-batch-tokens: alone (a micro-batch of its own), drop
    (leave it out and count it), error (stop there)"""

    arrivals: Arrivals = Arrivals.STEADY
    """arrivals of samples: steady (the window is full before each step) or trace (at their
    arrival_s, while a trainer takes the time that steps need)"""
    trainer_load: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] = 0.9
    """speed of the trainer with --arrivals trace: share of the trace's duration for which perfectly
    balanced ranks would be busy"""
    max_imbalance: Ratio = 0.0
    """share of trainer time that a plan may lose to stragglers and still go before the window is
    full, with --arrivals trace; 0 shows the best there is, serve's own default is 0.01"""
    max_wait: Duration = 2.0
    """time that ranks are idle before whatever there is is dispatched, with --arrivals trace"""
    run: str | None = None
    """replay only the rows with this in their run column"""
    steps: Positive | None = None
    """steps that count; unset: 100, or with --arrivals trace all there are; of a record the last"""
    seed: NotNegative = 0
    """seed of the permutations in which epochs of the trace arrive"""

    cost_error: tuple[Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)], ...] = ()
    """show also the excess of the same plans if the part of the cost that is proportional to the
    tokens were in truth so many times as large, as many as you like: 0.5 2"""

    format: Format = Format.TABLE
    """format of standard output: table or json; --json is short for --format json"""
    recommend: bool = False
    """name the window that is worth its delay, and the reason"""
    plans: Path | None = None
    """write every step to this file, as JSON lines, for anyone to check"""

    @property
    def combinations(self) -> list[tuple[Strategy, float, int]]:
        """Strategy, window and `max_split` of each row: strategies that take the oldest samples,
        then windows, then splits.
        """
        asked = dict.fromkeys(self.strategy)
        windows = dict.fromkeys(self.window)
        rows = [(each, 1.0, 1) for each in asked if not looks_ahead(each)]
        rows += [(each, size, 1) for each in asked if looks_ahead(each) for size in windows]
        return rows + ([(Strategy.WINDOW, 1.0, self.max_split)] if self.max_split > 1 else [])

    def serve_config(self, strategy: Strategy, window: float, max_split: int = 1) -> ServeConfig:
        """The config of `serve` for one row."""
        ours = self.model_dump(include=ServeConfig.model_fields.keys() & type(self).model_fields)
        limits = {"max_sample_tokens": 2**31 - 1, "group_timeout": float(2**40)}
        row = {"strategy": strategy, "window": window, "max_split": max_split}
        return ServeConfig(**ours | limits | row)

    def written(self) -> dict[str, Any]:
        """Every option that affects the figures, as JSON."""
        return self.model_dump(mode="json", exclude={"format", "recommend", "plans"})

    @model_validator(mode="before")
    @classmethod
    def _counted_groups(cls, given: dict[str, Any]) -> dict[str, Any]:
        names = "global_batch_groups", "group_size"
        has_groups = any(given.get(name) is not None for name in names)
        return {"groups": Grouping.STEP} | given if has_groups else given

    @model_validator(mode="after")
    def _servable(self) -> Self:
        for row in self.combinations:
            self.serve_config(*row)
        return self


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables of `serve` alone, such as the addresses in a pod."""
    foreign = options_of(ServeConfig).keys() - options_of(SimulateOptions).keys() | {"config"}
    names = {ENV_PREFIX + name.upper() for name in foreign}
    return {name: value for name, value in environ.items() if name not in names}


# -- a recorded run as defaults ---------------------------------------------------------------


def defaults_of(recording: Recording) -> dict[str, Any]:
    """Default options for a simulation of this run."""
    usual = SimulateOptions.model_fields["window"].default
    return {
        **_options(recording),
        "arrivals": Arrivals.TRACE,
        "window": tuple(sorted({*usual, _window(recording)})),
    }


def measured_defaults(recording: Recording, own: Setting, *, fits: bool) -> dict[str, Any]:
    """Defaults from measured times: the trainer's load and, if `fits`, the fitted cost.

    own: the run's own setting.
    """
    found: dict[str, Any] = {}
    if fits:
        cost, steps = fitted_cost(recording, own.core.cost)
        if cost.newest is not None:
            found["cost"] = str(cost.newest)
            recording.notes.append(f"without --cost: {cost.newest}, fitted to {steps} of the steps")
        else:
            recording.notes.append(
                f"without --cost: the one that auto begins with, as {steps} measured steps are too "
                "few to fit one"
            )
    load = trainer_load(recording, own)
    if load is not None:
        found["trainer_load"] = round(min(max(load, _LEAST_LOAD), _MOST_LOAD), 4)
    return found


def own_setting(recording: Recording) -> Setting:
    """The setting with which the run was planned. Raises ConfigError."""
    window = _window(recording)
    try:
        strategy = Strategy(recording.config["strategy"])
        options = SimulateOptions(**_options(recording), window=(window,))
        return setting_of(options, strategy, window, options.max_split)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{recording.name}: its options cannot be used ({error})") from None


def setting_of(
    options: SimulateOptions, strategy: Strategy, window: float, max_split: int = 1
) -> Setting:
    """The setting of one row."""
    config = options.serve_config(strategy, window, max_split)
    core = core_config(config)
    # A trace may begin or end amid a group.
    core = replace(core, limits=replace(core.limits, group_size=None))
    return Setting(strategy, window, config.plan_config(), core, options.cost_error)


def _window(recording: Recording) -> float:
    return float(recording.config.get("window", 1.0))


def _options(recording: Recording) -> dict[str, Any]:
    """The options of the last process that both commands have."""
    config = recording.config
    names = SimulateOptions.model_fields.keys() & config.keys() - _COMPARED
    return {name: config[name] for name in names}
