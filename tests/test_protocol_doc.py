"""docs/protocol.md and protocol-vectors.json tell the truth: generated, and what is spoken.

python -m tests.test_protocol_doc    writes them again

A vector is added to the file by hand: speaker, message, meaning, header, and `frame` with nothing
but the payload as its third part. The rest of it is written.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import PREFIX, FrameLimits
from rollout_dispatcher.protocol.sessions import RECEIVES, SENDS, Session, Side
from tests.support.generated import between, rewrite
from tests.support.wire.protocol_tables import PARTS, codes, meanings_of, messages, offer, states

DOC = Path(__file__).parent.parent / "docs" / "protocol.md"
VECTORS = DOC.with_name("protocol-vectors.json")
#: The conversation whose end the document shows; the rest is in the file beside it.
EXAMPLE = "A DP rank is refused"
BYTES_A_LINE = 48
LIMITS = FrameLimits(1 << 20, 1 << 20)
KINDS = {kind.__name__: kind for kind in m.MESSAGES.values()}


@dataclass(frozen=True)
class Vector:
    """One frame of a conversation, as the file has it."""

    speaker: Side
    message: m.Message
    meaning: str
    state: str
    frame: bytes
    payload: bytes


def conversations() -> dict[str, list[Vector]]:
    """The vectors, read from the file."""
    read = json.loads(VECTORS.read_text())
    return {title: [_read(vector) for vector in found] for title, found in read.items()}


def _read(vector: dict[str, Any]) -> Vector:
    message = KINDS[vector["message"]].model_validate_json(json.dumps(vector["header"]))
    parts = [bytes.fromhex(part) for part in vector["frame"]]
    return Vector(
        Side(vector["speaker"]), message, vector["meaning"], vector.get("state", ""),
        b"".join(parts), parts[-1],
    )  # fmt: skip


def vectors() -> dict[str, list[dict[str, Any]]]:
    """The conversations, each frame with the state that it leads to; bytes in hexadecimal."""
    found = {}
    for title, frames in conversations().items():
        client = Session(frames[0].speaker, LIMITS)
        found[title] = [_vector(vector, client) for vector in frames]
    return found


def _vector(vector: Vector, client: Session) -> dict[str, Any]:
    frame = _frame(vector)
    if vector.speaker is Side.DISPATCHER:
        _hear(client, frame)
    else:
        client.sent(frame)
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


def test_each_role_says_and_hears_every_message_in_a_vector() -> None:
    shown = {
        (frames[0].speaker, vector.speaker is Side.DISPATCHER, type(vector.message))
        for frames in conversations().values()
        for vector in frames
    }
    for role in (Side.PRODUCER, Side.RANK):
        legal = {(role, False, kind) for _, kind in SENDS[role]}
        legal |= {(role, True, kind) for _, kind in RECEIVES[role]}
        assert not legal - shown - {(role, False, m.Error)}


def test_every_field_has_a_vector_in_which_it_is_said() -> None:
    said: set[tuple[str, str]] = set()
    for found in json.loads(VECTORS.read_text()).values():
        said |= {(vector["message"], name) for vector in found for name in vector["header"]}
    fields = {(name, field) for name, kind in KINDS.items() for field in kind.model_fields}
    assert fields == said


@pytest.mark.parametrize("title", conversations())
def test_a_conversation_goes_through_the_states_that_are_shown_on_both_sides(title: str) -> None:
    shown = conversations()[title]
    role = shown[0].speaker
    sides = {role: Session(role, LIMITS), Side.DISPATCHER: Session(Side.DISPATCHER, LIMITS)}
    for vector in shown:
        (other,) = set(sides) - {vector.speaker}
        sides[vector.speaker].sent(vector.frame)
        assert _hear(sides[other], vector.frame) == [(vector.message, vector.payload)]
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
