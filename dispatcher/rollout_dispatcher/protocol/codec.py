"""Messages to frames and back."""

from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from rollout_dispatcher.errors import ProtocolError, VersionMismatch
from rollout_dispatcher.protocol.frame import Frame, encode_frame
from rollout_dispatcher.protocol.messages import MESSAGES, VERSION, Message, Offering

M = TypeVar("M", bound=Message)

#: Writes headers that no model has to check; of its arguments all but the first are left out.
_to_json = TypeAdapter(dict[str, object]).serializer.to_json


def encode(message: Message, payload_size: int = 0) -> bytes:
    """The frame of a message, up to its payload."""
    silent = None
    if message.optional:
        silent = {key for key in message.optional if not getattr(message, key)}
    header = message.model_dump_json(exclude_none=True, exclude=silent).encode()
    return encode_frame(message.type_code, header, payload_size)


def encode_checked(kind: type[Message], header: dict[str, object], payload_size: int) -> bytes:
    """`encode` for a message there are many of, from values that were checked when they came."""
    return encode_frame(kind.type_code, _to_json(header), payload_size)


def decode(frame: Frame) -> Message:
    """The message of a frame. Raises ProtocolError that names what is wrong with the header."""
    kind = MESSAGES.get(frame.type)
    if kind is None:
        raise ProtocolError(f"unknown message type {frame.type}")
    return _decode(kind, frame.header, kind.__name__)


def check_version(header: memoryview, name: str) -> None:
    """Raise VersionMismatch for the hello of that name if it is of another version than ours."""
    if (version := _decode(Offering, header, name).version) != VERSION:
        raise VersionMismatch(version, VERSION)


def _decode(kind: type[M], header: memoryview, name: str) -> M:
    try:
        return kind.model_validate_json(bytes(header))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "header"
        raise ProtocolError(f"{name}: {place}: {first['msg']}") from error
