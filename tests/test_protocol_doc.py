"""docs/protocol.md tells the truth: its tables and vectors are generated, and are what is spoken.

python -m tests.test_protocol_doc    writes them again
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import PREFIX
from rollout_dispatcher.protocol.sessions import HEARS, SAYS, Session, SessionState, Side
from tests.support.generated import between, rewrite
from tests.support.wire.conversations import CONVERSATIONS, LIMITS, Vector
from tests.support.wire.protocol_tables import PARTS, codes, meanings_of, messages, offer, states

DOC = Path(__file__).parent.parent / "docs" / "protocol.md"
BYTES_A_LINE = 32


def vectors() -> str:
    """The conversations, each frame with the state that it leads to."""
    found = []
    for title, frames in CONVERSATIONS.items():
        client = Session(frames[0].speaker, LIMITS)
        found += [f"### {title}", "", "```text"]
        for vector in frames:
            frame = _frame(vector)
            if vector.speaker is Side.DISPATCHER:
                _hear(client, frame)
            else:
                client.said(frame)
            found += _shown(vector, frame, client.state)
        found += ["```", ""]
    return "\n".join(found[:-1])


def _shown(vector: Vector, frame: bytes, state: SessionState) -> Iterator[str]:
    name = type(vector.message).__name__
    start = len(frame) - len(vector.payload)
    yield f"{vector.speaker} says {name}: {vector.meaning} -> {state}"
    yield f"  {frame[PREFIX.size : start].decode().rstrip()}"
    for part in (frame[: PREFIX.size], frame[PREFIX.size : start], vector.payload):
        for at in range(0, len(part), BYTES_A_LINE):
            yield f"    {part[at : at + BYTES_A_LINE].hex()}"


def _frame(vector: Vector) -> bytes:
    return codec.encode(vector.message, len(vector.payload)) + vector.payload


def _hear(session: Session, data: bytes) -> list[tuple[m.Message, bytes]]:
    found = []
    while data:
        target = session.get_buffer()
        taken = min(len(target), len(data))
        target[:taken], data = data[:taken], data[taken:]
        found += [(message, b"".join(parts)) for message, parts in session.received(taken)]
    return found


# -- the document


WRITTEN = {
    "offer": offer,
    "states": states,
    "messages": messages,
    "codes": codes,
    "vectors": vectors,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_document_is_up_to_date(name: str) -> None:
    text = DOC.read_text()
    start, stop = between(text, name)
    assert text[start:stop] == WRITTEN[name]() + "\n", "run: python -m tests.test_protocol_doc"


@dataclass(frozen=True)
class Shown:
    """A vector as the document has it."""

    speaker: Side
    name: str
    state: str
    header: dict[str, Any]
    frame: bytes


def conversations() -> dict[str, list[Shown]]:
    """The vectors, read from the document."""
    text = DOC.read_text()
    start, stop = between(text, "vectors")
    found = re.findall(r"### ([^\n]*)\n\n```text\n(.*?)```", text[start:stop], re.DOTALL)
    return {title: list(_read(body)) for title, body in found}


def _read(body: str) -> Iterator[Shown]:
    vector = r"^(\w+) says (\w+): .* -> ([\w-]+)\n  (\{.*\})\n((?:    [0-9a-f]+\n)+)"
    for speaker, name, state, header, lines in re.findall(vector, body, re.MULTILINE):
        frame = bytes.fromhex("".join(lines.split()))
        yield Shown(Side(speaker), name, state, json.loads(header), frame)


def test_each_role_says_and_hears_every_message_in_a_vector() -> None:
    shown = {
        (frames[0].speaker, vector.speaker is Side.DISPATCHER, type(vector.message))
        for frames in CONVERSATIONS.values()
        for vector in frames
    }
    for role in (Side.PRODUCER, Side.RANK):
        legal = {(role, False, kind) for _, kind in SAYS[role]}
        legal |= {(role, True, kind) for _, kind in HEARS[role]}
        assert not legal - shown - {(role, False, m.Error)}


def test_every_field_has_a_vector_in_which_it_is_said() -> None:
    said: set[tuple[str, str]] = set()
    for vector in (vector for found in conversations().values() for vector in found):
        said |= {(vector.name, name) for name in vector.header}
    fields = {
        (kind.__name__, name)
        for kind in m.MESSAGES.values()
        for name, field in kind.model_fields.items()
    }
    assert fields == said


@pytest.mark.parametrize("title", CONVERSATIONS)
def test_a_conversation_goes_through_the_states_that_are_shown_on_both_sides(title: str) -> None:
    shown = conversations()[title]
    assert len(shown) == len(CONVERSATIONS[title])
    role = shown[0].speaker
    sides = {role: Session(role, LIMITS), Side.DISPATCHER: Session(Side.DISPATCHER, LIMITS)}
    for vector in shown:
        (other,) = set(sides) - {vector.speaker}
        sides[vector.speaker].said(vector.frame)
        ((message, payload),) = _hear(sides[other], vector.frame)
        assert type(message).__name__ == vector.name
        assert type(message).model_validate_json(json.dumps(vector.header)) == message
        assert codec.encode(message, len(payload)) + payload == vector.frame
        assert {session.state for session in sides.values()} == {vector.state}


def test_every_field_has_a_meaning() -> None:
    parts: list[type[m.Part]] = [*m.MESSAGES.values(), *PARTS]
    for part in parts:
        assert set(meanings_of(part)) == set(part.model_fields), part.__name__


def main() -> None:
    """Write the generated parts into the document."""
    rewrite(DOC, WRITTEN)


if __name__ == "__main__":
    main()
