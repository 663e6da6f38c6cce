"""What a sample says of itself beside its tensors, wherever those are."""

import uuid
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict
from pydantic import Field as Declared

from rollout_dispatcher.protocol.messages import Extent, Name, Version
from rollout_dispatcher.sample import SIZE_AT_CLOSE, SIZE_NOT_TOLD, content_checksum
from rollout_dispatcher.service.http.bodies.tensors import FieldRefused, Reading

#: What a `group_size` says that is told when the group is closed.
AT_CLOSE: Final = "at-close"


class Metadata(BaseModel):
    """Of one sample."""

    model_config = ConfigDict(extra="forbid", strict=True)
    sample_id: Name | None = None
    group_id: Name | None = None
    group_size: Extent | Literal["at-close"] | None = None
    policy_version: Version | None = None
    staleness_exempt: Annotated[
        bool,
        Declared(
            description="trained on however old it is: a demonstration, or of a replay buffer; "
            "where --max-staleness is set every other sample needs a policy_version"
        ),
    ] = False

    def check_group(self) -> None:
        """Raise FieldRefused for a size without a group."""
        size = self.group_size
        if self.group_id is None and size is not None and size != 1:
            raise FieldRefused(
                f"group_size is {size}, and no group_id says which samples belong together"
            )

    def told(
        self, reading: Reading, span: Iterable[memoryview], tokens: int, rows: tuple[int, ...]
    ) -> dict[str, Any]:
        """What the sample has of it: one without an id is given one, another one a checksum."""
        size = SIZE_NOT_TOLD if reading.group_size is None else reading.group_size
        if self.group_size is not None:
            size = SIZE_AT_CLOSE if self.group_size == AT_CLOSE else int(self.group_size)
        checksum = None
        if self.sample_id is not None:
            facts = (tokens, rows, self.group_id, self.policy_version)
            checksum = content_checksum(span, *facts)
        return {
            "checksum": checksum,
            "sample_id": self.sample_id or f"http/{uuid.uuid4().hex}",
            "group_id": self.group_id,
            "group_size": size if self.group_id is not None else 1,
            "policy_version": self.policy_version,
            "staleness_exempt": self.staleness_exempt,
        }
