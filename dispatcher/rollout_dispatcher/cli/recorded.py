"""A recorded run as defaults: the options that it ran with, in the words of `simulate`."""

from typing import Any

from rollout_dispatcher.cli.simulate_options import Arrivals, SimulateOptions
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.record.recording import Recording
from rollout_dispatcher.service.config.serve import core_config
from rollout_dispatcher.simulate.recorded.as_it_ran import trainer_load
from rollout_dispatcher.simulate.replay.virtual import Setting
from rollout_planner.types import Strategy

#: What `simulate` takes several of.
_COMPARED = {"strategy", "window_multiple"}
#: Bounds of --trainer-load; a record of very little says more than can be.
_LEAST_LOAD, _MOST_LOAD = 0.01, 10.0


def defaults_of(recording: Recording) -> dict[str, Any]:
    """What a simulation of this run is to be told, unless the user says otherwise."""
    usual = SimulateOptions.model_fields["window_multiple"].default
    found = {
        **_options(recording),
        "arrivals": Arrivals.TRACE,
        "window_multiple": tuple(sorted({*usual, _window(recording)})),
    }
    load = trainer_load(recording, own_setting(recording))
    if load is not None:
        found["trainer_load"] = round(min(max(load, _LEAST_LOAD), _MOST_LOAD), 4)
    return found


def own_setting(recording: Recording) -> Setting:
    """What the run was planned with."""
    window = _window(recording)
    try:
        strategy = Strategy(recording.config["strategy"])
        options = SimulateOptions(**_options(recording), window_multiple=(window,))
        return setting_of(options, strategy, window)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{recording.name}: its options cannot be used ({error})") from None


def setting_of(options: SimulateOptions, strategy: Strategy, window: float) -> Setting:
    """What one row of a table is run with."""
    config = options.serve_config(strategy, window)
    return Setting(strategy, window, config.plan_config(), core_config(config), options.cost_error)


def _window(recording: Recording) -> float:
    return float(recording.config.get("window_multiple", 1.0))


def _options(recording: Recording) -> dict[str, Any]:
    """Options that both commands have, of the process that wrote last."""
    config = recording.config
    names = SimulateOptions.model_fields.keys() & config.keys() - _COMPARED
    found = {name: config[name] for name in names}
    if found.get("dispatch_batch_size") is None:  # counted in groups, of sizes that vary
        sizes = [len(step.tickets) for step in recording.steps.values()]
        found["dispatch_batch_size"] = round(sum(sizes) / len(sizes)) if sizes else 1
    return found
