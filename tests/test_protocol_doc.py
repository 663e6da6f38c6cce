"""docs/protocol.md and protocol-vectors.json tell the truth: generated, and what is spoken.

python -m tests.test_protocol_doc    writes them again
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import PREFIX
from rollout_dispatcher.protocol.sessions import HEARS, SAYS, Session, Side
from tests.support.generated import between, rewrite
from tests.support.wire.conversations import CONVERSATIONS, LIMITS, Vector
from tests.support.wire.protocol_tables import PARTS, codes, meanings_of, messages, offer, states

DOC = Path(__file__).parent.parent / "docs" / "protocol.md"
VECTORS = DOC.with_name("protocol-vectors.json")
#: The conversation whose end the document shows; the rest is in the file beside it.
EXAMPLE = "A DP rank is refused"
BYTES_A_LINE = 48


def vectors() -> dict[str, list[dict[str, Any]]]:
    """The conversations, each frame with the state that it leads to; bytes in hexadecimal."""
    found = {}
    for title, frames in CONVERSATIONS.items():
        client = Session(frames[0].speaker, LIMITS)
        found[title] = [_vector(vector, client) for vector in frames]
    return found


def _vector(vector: Vector, client: Session) -> dict[str, Any]:
    frame = _frame(vector)
    if vector.speaker is Side.DISPATCHER:
        _hear(client, frame)
    else:
        client.said(frame)
    start = len(frame) - len(vector.payload)
    header = frame[PREFIX.size : start]
    return {
        "speaker": vector.speaker,
        "message": type(vector.message).__name__,
        "meaning": vector.meaning,
        "state": client.state,
        "header": json.loads(header),
        "frame": [frame[: PREFIX.size].hex(), header.hex(), vector.payload.hex()],
    }


def example() -> str:
    """One frame: what it says, and its bytes."""
    vector, digits = vectors()[EXAMPLE][-1], 2 * BYTES_A_LINE
    lines = ["{speaker} says {message}: {meaning} -> {state}".format(**vector)]
    lines.append(f"  {json.dumps(vector['header'], separators=(',', ':'))}")
    for part in vector["frame"]:
        lines += [f"    {part[at : at + digits]}" for at in range(0, len(part), digits)]
    return "\n".join(["```text", *lines, "```"])


def written_vectors() -> str:
    """The file: a line a frame, so that a difference is read as one."""
    titles = []
    for title, found in vectors().items():
        lines = ",\n  ".join(json.dumps(vector, separators=(",", ":")) for vector in found)
        titles.append(f"{json.dumps(title)}: [\n  {lines}\n]")
    return "{\n" + ",\n".join(titles) + "\n}\n"


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
    "vectors": example,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_document_is_up_to_date(name: str) -> None:
    text = DOC.read_text()
    start, stop = between(text, name)
    assert text[start:stop] == WRITTEN[name]() + "\n", "run: python -m tests.test_protocol_doc"


def test_the_file_of_vectors_is_up_to_date() -> None:
    assert VECTORS.read_text() == written_vectors(), "run: python -m tests.test_protocol_doc"


@dataclass(frozen=True)
class Shown:
    """A vector as the file has it."""

    speaker: Side
    name: str
    state: str
    header: dict[str, Any]
    frame: bytes


def conversations() -> dict[str, list[Shown]]:
    """The vectors, read from the file."""
    read = json.loads(VECTORS.read_text())
    return {title: [_read(vector) for vector in found] for title, found in read.items()}


def _read(vector: dict[str, Any]) -> Shown:
    frame = bytes.fromhex("".join(vector["frame"]))
    return Shown(
        Side(vector["speaker"]), vector["message"], vector["state"], vector["header"], frame
    )


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
    """Write the generated parts into the document, and the file of vectors."""
    rewrite(DOC, WRITTEN)
    VECTORS.write_text(written_vectors())


if __name__ == "__main__":
    main()
