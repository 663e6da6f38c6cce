"""Turn pydantic's complaint about an argument into an error of ours."""

from collections.abc import Callable
from typing import TypeVar

from pydantic import ValidationError

from rollout_dispatcher.errors import ConfigError

T = TypeVar("T")


def validated(action: Callable[[], T]) -> T:
    """Run what builds a message of a caller's arguments; raises ConfigError that names one."""
    try:
        return action()
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise ConfigError(f"{place} is {fault['input']!r}: {fault['msg']}") from error
