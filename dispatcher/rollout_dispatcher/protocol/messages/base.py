"""What every message has, and the registry of all of them.

A message is one frozen, strictly validated model; a header is its JSON. Class docstrings say what
each field means, and docs/protocol.md is written from them.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict
from pydantic import Field as Declared

from rollout_dispatcher.errors import ProtocolError

MAX_NAME = 128
Name = Annotated[str, Declared(min_length=1, max_length=MAX_NAME)]
Count = Annotated[int, Declared(ge=0, lt=2**53)]
Tokens = Annotated[int, Declared(ge=0, lt=2**31)]
Rows = Annotated[int, Declared(ge=0, lt=2**31)]
Version = Annotated[int, Declared(ge=0, lt=2**53)]
Extent = Annotated[int, Declared(ge=1, lt=2**31)]
Checksum = Annotated[int, Declared(ge=0, lt=2**32)]
Total = Annotated[int, Declared(ge=1, lt=2**53)]
#: A step's number, -1 for none.
Watermark = Annotated[int, Declared(ge=-1, lt=2**53)]
#: Of what a payload store has said, for people; whoever tells it cuts it off there.
MAX_WHY_LETTERS = 400
Why = Annotated[str, Declared(max_length=MAX_WHY_LETTERS)]


class Part(BaseModel):
    """What a header is made of: immutable, no unknown keys, no coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Message(Part):
    """Base of all messages; a class that has a `type_code` can be sent."""

    type_code: ClassVar[int]
    #: Keys of a capability, which a peer without it would refuse: left out while they say nothing.
    optional: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Register it."""
        super().__pydantic_init_subclass__(**kwargs)
        if "type_code" in cls.__dict__:
            known = MESSAGES.setdefault(cls.type_code, cls)
            assert known is cls, f"{cls.__name__} has the code of {known.__name__}"

    def spans(self, nbytes: int) -> Sequence[int]:
        """How a payload of `nbytes` bytes is cut: the size of each piece that has its own memory.

        Raises ProtocolError when the header says that there are more or fewer bytes.
        """
        if nbytes:
            raise ProtocolError(f"{type(self).__name__} does not carry a payload")
        return ()


#: By type code.
MESSAGES: dict[int, type[Message]] = {}
