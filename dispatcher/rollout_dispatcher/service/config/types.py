"""What the value of an option can be: choices by name, addresses, counts.

Each is read from a flag, an environment variable and a TOML key alike, and a value that cannot be
read raises ValueError, to which pydantic adds the option's name. Quantities are in `units`.
"""

import re
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.journal.policy import parse_sync
from rollout_dispatcher.protocol.endpoint import Endpoint


class LastBatch(StrEnum):
    """What becomes of the samples that are left when the stream ends."""

    FLUSH = "flush"
    DROP = "drop"


class IncompleteGroups(StrEnum):
    """What becomes of a group that will never be whole."""

    DROP = "drop"
    KEEP = "keep"


class Retain(StrEnum):
    """How long the samples of committed steps are kept."""

    COMMIT = "commit"
    CHECKPOINT = "checkpoint"


class LogLevel(StrEnum):
    """The least severe message that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How a message is written; `auto` is text on a terminal and JSON elsewhere."""

    AUTO = "auto"
    JSON = "json"
    TEXT = "text"


#: What the address of a payload store begins with: its scheme. What follows is known to workers
#: alone, but that of files is mistyped so easily (`file://mnt`) that it is looked at here.
_STORE = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*:.|file:(//(localhost)?)?/[^/]", re.ASCII)


def _read_endpoint(value: object) -> object:
    try:
        return Endpoint.parse(value) if isinstance(value, str) else value
    except ConfigError as error:  # pydantic knows ValueError, and then tells which option it was
        raise ValueError(str(error)) from None


def split_commas(value: object) -> object:
    """Each text may hold several values, with commas between them."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    parts = (part.split(",") if isinstance(part, str) else [part] for part in value)
    return tuple(part for several in parts for part in several)


def one_or_several(value: object) -> object:
    """A text by itself is a list of one."""
    return (value,) if isinstance(value, str) else value


def _read_store(value: str) -> str:
    if _STORE.match(value.strip()) is None:
        raise ValueError(
            "write the address of a payload store with its scheme, and a directory by its whole "
            f"path, as in file:///mnt/rollouts, not {value!r}"
        )
    return value.strip()


def _read_sync(value: str) -> str:
    try:
        parse_sync(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return value


#: Where the HTTP plane is, unless told otherwise.
HTTP_PLANE = Endpoint("127.0.0.1", 9471)
#: What its probes are answered with: whose run it is, and of which version.
RUN_HEADER, VERSION_HEADER = "Rollout-Dispatcher-Run-Id", "Rollout-Dispatcher-Version"

Address = Annotated[
    Endpoint, BeforeValidator(_read_endpoint), PlainSerializer(str, when_used="json")
]
StoreAddress = Annotated[str, Field(max_length=1024), AfterValidator(_read_store)]
Positive = Annotated[int, Field(ge=1, lt=2**53)]
NotNegative = Annotated[int, Field(ge=0, lt=2**53)]
#: A window, in dispatch batches.
Multiple = Annotated[float, Field(ge=1, le=64, allow_inf_nan=False)]
#: A share of one, or more.
Ratio = Annotated[float, Field(ge=0, allow_inf_nan=False)]
#: A share of the mean, or no bound.
Variation = Annotated[float, Field(gt=0, le=16, allow_inf_nan=False)] | Literal["off"]
JournalSync = Annotated[str, AfterValidator(_read_sync)]
