"""Rollout dispatcher: buffers RL samples and streams balanced micro-batches to DP ranks.

Use `Dispatcher` and `ServeConfig` to run one inside another program. They are loaded on first use,
so that importing `rollout_dispatcher.errors` (every error raised on purpose) or another small
module does not load the server's libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from rollout_dispatcher.hints import to_install

if TYPE_CHECKING:
    from rollout_dispatcher.service.config.serve import ServeConfig
    from rollout_dispatcher.service.dispatcher import Dispatcher

__version__ = "0.2.0"
__all__ = ["Dispatcher", "ServeConfig", "__version__"]

_HOMES = {
    "Dispatcher": "rollout_dispatcher.service.dispatcher",
    "ServeConfig": "rollout_dispatcher.service.config.serve",
}


def __getattr__(name: str) -> object:
    """Import the module that a public name lives in; an ImportError says what to install."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rollout_dispatcher' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if (remedy := to_install(error)) is None:
            raise
        raise ImportError(f"{name} {remedy}", name=error.name) from error
