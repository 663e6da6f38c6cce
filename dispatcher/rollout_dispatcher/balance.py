"""The planner, by its name in the dispatcher: see `rollout_planner`."""

from rollout_planner import *  # noqa: F403
from rollout_planner import __all__  # noqa: F401
