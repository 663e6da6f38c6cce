"""Rollout dispatcher: buffers RL samples and streams balanced micro-batches to DP ranks.

To run one inside a program of your own: `Dispatcher` and `ServeConfig`. They are loaded when first
asked for, so that who needs a word of ours (`rollout_dispatcher.errors`: every error that we raise
on purpose) does not wait for a server's libraries.
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
