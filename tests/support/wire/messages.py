"""One example of every message of the sample plane, and a strategy for all there are.

The strategies draw every value that a message may carry, to the edge of its range, as its fields
declare it; that each is legal is what the round-trip test says.
"""

from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import DType, Outcome

IDS = m.FieldHeader(name="input_ids", dtype=DType.INT64)

EXAMPLES: dict[type[m.Message], m.Message] = {
    type(message): message
    for message in (
        m.HelloProducer(client_id="p"),
        m.HelloRank(client_id="r", dp_rank=0, dp_size=2),
        m.WelcomeProducer(
            run_id="run", credits=8, max_payload_bytes=1024, heartbeat_interval_s=5.0
        ),
        m.WelcomeRank(
            run_id="run", generation=1, committed=-1, max_open_steps=4, layout="packed",
            heartbeat_interval_s=5.0,
        ),
        m.Push(first_seq=0, floor=0, fields=[IDS], tokens=[], loss_tokens=[], sample_ids=[]),
        m.Pushed(first_seq=0, outcomes=[Outcome.ACCEPTED]),
        m.Blocked(first_seq=0, cap="samples", held=8, capacity=8),
        m.CloseGroup(group_id="g", size=3, keep=True),
        m.EndPhase(policy_version=3),
        m.EndStream(),
        m.Demand(taken=-1, hungry=True),
        m.PolicyVersion(policy_version=3, first_step=7),
        m.StepHeader(
            step=0, digest="d", num_micro_batches=1, num_samples=2, tokens=9, loss_tokens=5,
            loss_samples=1, fields=[IDS],
        ),
        m.MicroBatch(step=0, index=0, tokens=[], loss_tokens=[], sample_ids=[]),
        m.Prepared(step=0, digest="d"),
        m.Release(step=0),
        m.Commit(step=0),
    m.Commit(step=3, times=[m.PassTimes(busy_s=[0.5, 0.25], collective_s=[0.0, 0.125])]),
        m.End(reason=EndReason.ENDED),
        m.Error(code="protocol", message="no"),
        m.Ping(),
        m.Ping(handed_out=3, collectives=812),
        m.Pong(),
        m.Bye(),
        m.CheckpointSaved(step=3),
        m.Resend(first_seq=5),
        m.SchemaKnown(fields=[IDS], set_by="declared by --fields"),
        m.Feedback(policy_version=3, expected_version=4, remaining=8),
        m.Dropped(reason="stale", sample_ids=["s"], group_ids=["g"]),
        m.StepTimes(step=3, busy_s=[0.5, 0.25], collective_s=[0.0, 0.125]),
        m.Unresolved(step=3, attempt=0, sample_ids=["s"]),
        m.StepWithdrawn(step=3),
        m.LastStep(step=3),
        m.Advice(text="no checkpoint was reported as saved so far"),
        m.Finish(step=3, discard=True),
        m.Free(number=0, store="file:///a", keys=["p/0"]),
        m.Freed(number=0),
        m.Sweep(number=1, store="file:///a", prefix="p/"),
        m.Swept(number=1, keys=["p/1"]),
    )
}  # fmt: skip

Values = st.SearchStrategy[Any]

#: Lists, and longer texts, are no longer than this here, whatever they may be.
MOST, LETTERS = 4, 128
#: Fields of a kind whose lists have one entry for each of the same things.
ALIKE: dict[type[m.Part], tuple[str, ...]] = {
    m.Push: ("tokens", "rows", *m.Push.each),
    m.MicroBatch: ("tokens", "rows", *m.MicroBatch.each),
    m.PassTimes: ("busy_s", "collective_s"),
    m.Dropped: ("sample_ids", "group_ids"),
}


def every(kind: type[m.Part]) -> Values:
    """All that it may say."""
    alike = next((names for base, names in ALIKE.items() if issubclass(kind, base)), ())
    least = 0 if issubclass(kind, m.HasSamples) else 1

    def sized(size: int) -> Values:
        fields = {
            name: _values(
                field.annotation, _limits(field.metadata), size if name in alike else None
            )
            for name, field in kind.model_fields.items()
        }
        if "fields" in fields:
            headers = every(m.FieldHeader)
            fields["fields"] = st.lists(
                headers, min_size=1, max_size=MOST, unique_by=lambda header: header.name
            )
        if issubclass(kind, m.HasSamples):
            fields = {name: fields[name] for name in fields if name not in {"objects", "places"}}
            given = st.fixed_dictionaries(fields)
            return st.builds(lambda some, where: kind(**some, **where), given, _places(size))
        if kind is m.HelloProducer:
            words = st.none() | st.text("0123456789abcdef", min_size=1, max_size=8)
            fields["incarnation"] = st.none()
            return st.builds(_with_incarnation, st.builds(kind, **fields), words)
        return st.builds(kind, **fields)

    return st.integers(least, MOST).flatmap(sized)


def _places(size: int) -> Values:
    """Where samples lie: some of them in two objects, or all in the payload."""
    place = st.none() | st.tuples(st.integers(0, 1), st.integers(0, 2**53 - 1))
    objects = st.lists(every(m.ObjectHeader), min_size=2, max_size=2)
    places = st.lists(place, min_size=size, max_size=size)
    return st.just({}) | st.fixed_dictionaries({"objects": objects, "places": places})


def _with_incarnation(hello: m.HelloProducer, word: str | None) -> m.HelloProducer:
    name = None if word is None else f"{hello.client_id}.{word}"
    return hello.model_copy(update={"incarnation": name})


def _limits(metadata: Iterable[Any]) -> dict[str, Any]:
    """The bounds that a field declares, by the names that they have there."""
    found: dict[str, Any] = {}
    for item in metadata:
        if isinstance(item, FieldInfo):
            found |= _limits(item.metadata)
        elif is_dataclass(item) and not isinstance(item, type):
            found |= asdict(item)
    return found


def _values(kind: Any, limits: dict[str, Any], size: int | None = None) -> Values:
    """Of a type within limits; lists of this size, if one is given."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _values(parts[0], limits | _limits(parts[1:]), size)
    if origin in {Union, UnionType}:
        return st.one_of(*(_values(part, limits, size) for part in parts))
    if origin is list:
        least, most = limits.get("min_length", 0), min(limits.get("max_length", MOST), MOST)
        least, most = (least, most) if size is None else (size, size)
        return st.lists(_values(parts[0], {}), min_size=least, max_size=most)
    if origin is tuple:
        return st.tuples(*(_values(part, {}) for part in parts))
    if origin is dict:
        return st.dictionaries(_values(parts[0], {}), _values(parts[1], {}, size), max_size=3)
    if origin is Literal:
        return st.sampled_from(parts)
    return _plain(kind, limits)


def _plain(kind: type, limits: dict[str, Any]) -> Values:
    if issubclass(kind, m.Part):
        return every(kind)
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    if kind is int:
        return st.integers(limits["ge"], limits["lt"] - 1)
    if kind is float:
        return st.floats(limits.get("ge", 0), limits.get("le", 1e9))
    if kind is str:
        least, most = limits.get("min_length", 0), min(limits.get("max_length", LETTERS), LETTERS)
        return st.text(st.characters(codec="utf-8"), min_size=least, max_size=most)
    return {bool: st.booleans(), NoneType: st.none()}[kind]


STRATEGIES: dict[type[m.Message], st.SearchStrategy[m.Message]] = {
    kind: every(kind) for kind in m.MESSAGES.values()
}
