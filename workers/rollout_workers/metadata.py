"""What is said of a sample beside its fields, as a push has it, or why it cannot be.

Numbers may be numpy's or torch's. What would be taken for something else is refused here, where its
name is known: a `group_size` of 0 would be a group that is never whole.
"""

import reprlib
from collections.abc import Mapping
from operator import index
from typing import Any, Literal

from rollout_dispatcher.errors import SampleRefused

#: Members of a group: a number, or that it is told when the group is closed.
GroupSize = int | Literal["at-close"]
AT_CLOSE: Literal["at-close"] = "at-close"
TOLD_AT_CLOSE = 0

#: Columns of a push, and what users call a value of one.
_CALLED = {
    "sample_ids": "sample_id",
    "group_ids": "group_id",
    "group_sizes": "group_size",
    "policy_versions": "policy_version",
    "staleness_exempt": "staleness_exempt",
}


def version_of(given: Any) -> int:
    """A policy version. Raises SampleRefused if it is no whole number."""
    return _whole("policy_version", given)


def size_of(given: Any, group_id: str | None) -> int:
    """The size of a sample's group. Raises SampleRefused if no group can have it."""
    is_told = isinstance(given, str) and given == AT_CLOSE
    size = TOLD_AT_CLOSE if is_told else _whole("group_size", given)
    if size < 1 and not is_told:
        raise SampleRefused(
            "bad-metadata",
            f"group_size is {size}; write how many samples the group has in all, or {AT_CLOSE!r} "
            "if close_group tells it",
        )
    if group_id is None and size != 1:
        raise SampleRefused(
            "bad-metadata",
            f"group_size is {given}, and no group_id says which samples belong together",
        )
    return size


def refusal(fault: Mapping[str, Any]) -> SampleRefused:
    """What is wrong with a column of a push, in the words of who pushed."""
    place = ".".join(str(part) for part in fault["loc"])
    name = _CALLED.get(str(fault["loc"][0])) if fault["loc"] else None
    where = f"{name} is {reprlib.repr(fault['input'])}" if name else place
    return SampleRefused("bad-metadata", f"{where}: {fault['msg']}")


def _whole(name: str, given: Any) -> int:
    try:
        return index(given)
    except TypeError:
        kind = type(given).__name__
        raise SampleRefused(
            "bad-metadata", f"{name} is {reprlib.repr(given)}, a {kind}; write a whole number"
        ) from None
