"""What requests can be told in their paths and queries: the models that check and describe them."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rollout_dispatcher.service.config.units import Duration


class Query(BaseModel):
    """What stands behind the question mark; nothing else may."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class PushQuery(Query):
    """Of `POST /v1/samples`."""

    wait: Duration | None = None
    """how long the request may be held while a cap is reached, at most --request-timeout; without
    it a push that finds no room is answered 429 at once"""


class CloseQuery(Query):
    """Of `POST /v1/groups/ID/close`."""

    size: Annotated[int, Field(ge=1)] | None = None
    """how many members the group has in all; unset: those that have come"""
    keep: bool | None = None
    """train on a group that lacks members; unset: --incomplete-groups"""


class EndQuery(Query):
    """Of the ends of a phase and of the stream."""

    force: bool = False
    """it ends for all producers, whatever they have said"""


class GroupPath(BaseModel):
    """Of `/v1/groups/ID/close`."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    group_id: Annotated[str, Field(min_length=1)]
    """the group's id, as its samples say it"""


class PhasePath(BaseModel):
    """Of `/v1/phases/V/end`."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    #: All policy versions are below 2**53, on this plane as on the other.
    policy_version: Annotated[str, Field(pattern=r"^[0-9]{1,15}$")]
    """samples of older policy versions come no more"""


class ControlAnswer(BaseModel):
    """What closing a group, and ending a phase or the stream, is answered with."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    waits_for: list[str]
    """producers whose word is still waited for"""
