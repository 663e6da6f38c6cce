"""One example of every message of the sample plane, and a strategy for all there are.

The strategies draw every value that a message may carry, to the edge of its range; that each is
legal is what the round-trip test says.
"""

from typing import Any

from hypothesis import strategies as st

from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.slices import Slicing
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

_text = st.text(st.characters(codec="utf-8"), max_size=20)
_names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=128)
_counts = st.integers(0, 2**53 - 1)
_extents = st.integers(1, 2**31 - 1)
_totals = st.integers(1, 2**53 - 1)
_watermarks = st.integers(-1, 2**53 - 1)
_keys = st.lists(_names, max_size=3)
_seconds = st.floats(0, 1e6)
_fields = st.lists(
    st.builds(
        m.FieldHeader,
        name=_names,
        dtype=st.sampled_from(DType),
        per_token=st.booleans(),
        shape=st.lists(_extents, max_size=8),
        ragged=st.sampled_from([None, True]),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda field: field.name,
)


_known = st.builds(m.SchemaKnown, fields=_fields, set_by=_text)
_feedback = dict.fromkeys(("policy_version", "expected_version", "remaining"), st.none() | _counts)


def _times(size: int) -> st.SearchStrategy[m.StepTimes]:
    return st.builds(m.StepTimes, step=_counts, **_of_pass(size))


def _pass_times(size: int) -> st.SearchStrategy[m.PassTimes]:
    return st.builds(m.PassTimes, **_of_pass(size))


def _of_pass(size: int) -> dict[str, st.SearchStrategy[Any]]:
    times = st.lists(st.floats(0, 1e9), min_size=size, max_size=size)
    return {
        "cost_key": _names,
        "busy_s": times,
        "collective_s": st.none() | times,
        "why": _text,
    }


def _dropped(size: int) -> st.SearchStrategy[m.Dropped]:
    ids = st.lists(_names, min_size=size, max_size=size)
    groups = st.none() | st.lists(st.none() | _names, min_size=size, max_size=size)
    return st.builds(m.Dropped, reason=_names, sample_ids=ids, group_ids=groups)


def _columns(size: int) -> dict[str, st.SearchStrategy[object]]:
    def column(values: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
        return st.lists(values, min_size=size, max_size=size)

    return {
        "tokens": column(st.integers(0, 2**31 - 1)),
        "loss_tokens": column(_counts),
        "sample_ids": column(_names),
        "group_ids": st.none() | column(st.none() | _names),
        "policy_versions": st.none() | column(st.none() | _counts),
        "rows": st.none() | st.dictionaries(_names, column(st.integers(0, 2**31 - 1)), max_size=3),
    }


def _places(size: int) -> st.SearchStrategy[dict[str, object]]:
    """Where samples lie, as all kinds of messages that have samples say it."""
    stored = st.builds(m.ObjectHeader, store=_names, key=_names, nbytes=_totals)
    place = st.none() | st.tuples(st.integers(0, 1), _counts)
    found = {
        "objects": st.lists(stored, min_size=2, max_size=2),
        "places": st.lists(place, min_size=size, max_size=size),
    }
    return st.just({}) | st.fixed_dictionaries(found)


def _placed(
    kind: type[m.Message],
    places: st.SearchStrategy[dict[str, object]],
    **values: st.SearchStrategy[object],
) -> st.SearchStrategy[Any]:
    """Of a kind that has samples, at such places."""
    given = st.fixed_dictionaries(values)
    return st.builds(lambda some, where: kind(**some, **where), given, places)


def _pushes(size: int) -> st.SearchStrategy[m.Push]:
    sizes = st.none() | st.lists(_extents, min_size=size, max_size=size)
    exempt = st.none() | st.lists(st.booleans(), min_size=size, max_size=size)
    sums = st.none() | st.lists(st.integers(0, 2**32 - 1), min_size=size, max_size=size)
    return _placed(
        m.Push,
        _places(size),
        first_seq=_counts,
        floor=_counts,
        named=st.booleans(),
        group_sizes=sizes,
        staleness_exempt=exempt,
        checksums=sums,
        fields=_fields,
        **_columns(size),
    )


_ranges = st.lists(st.tuples(_counts, _counts), max_size=2)


def _micro_batches(size: int) -> st.SearchStrategy[m.MicroBatch]:
    return _placed(
        m.MicroBatch,
        _places(size),
        attempt=_counts,
        step=_counts,
        index=_counts,
        is_filler=st.booleans(),
        group_numbers=st.none() | st.lists(_counts, min_size=size, max_size=size),
        cp_size=st.none() | _extents,
        cp_rank=_counts,
        ranges=st.none() | st.lists(_ranges, min_size=size, max_size=size),
        **_columns(size),
    )


def _hello_of(client_id: str) -> st.SearchStrategy[m.Message]:
    words = st.text("0123456789abcdef", min_size=1, max_size=8)
    return st.builds(
        m.HelloProducer,
        client_id=st.just(client_id),
        version=_extents,
        opens_stores=st.booleans(),
        feedback=st.booleans(),
        key=st.none() | st.text("0123456789abcdef", min_size=16, max_size=128),
        incarnation=st.none() | words.map(lambda word: f"{client_id}.{word}"),
    )


STRATEGIES: dict[type[m.Message], st.SearchStrategy[m.Message]] = {
    m.HelloProducer: _names.flatmap(_hello_of),
    m.HelloRank: st.builds(
        m.HelloRank,
        client_id=_names,
        version=_extents,
        opens_stores=st.booleans(),
        run_id=st.none() | _names,
        dp_rank=_counts,
        dp_size=_extents,
        generation=st.none() | _extents,
        prefetch_steps=_counts,
        taken=_watermarks,
        committed=_watermarks,
        hungry=st.booleans(),
        received=st.lists(st.tuples(_counts, _counts), max_size=4),
        policy_version=st.none() | _counts,
        policy_step=st.none() | _counts,
        resume=st.none() | st.builds(m.CheckpointPosition, run_id=_names, step=_watermarks),
        saved=_watermarks,
        packed_length=st.none() | _extents,
        max_split=st.none() | _extents,
        slicing=st.none() | st.sampled_from(Slicing),
        training=st.dictionaries(_names, _names, max_size=3),
        finished=st.none() | _watermarks,
        discard=st.booleans(),
    ),
    m.WelcomeProducer: st.builds(
        m.WelcomeProducer,
        run_id=_names,
        credits=_extents,
        max_payload_bytes=_totals,
        schema_known=st.none() | _known,
        max_staleness=st.none() | _counts,
        heartbeat_interval_s=_seconds,
        payload_stores=st.lists(_names, max_size=3),
        inline_limit=st.none() | _counts,
    ),
    m.WelcomeRank: st.builds(
        m.WelcomeRank,
        run_id=_names,
        generation=_extents,
        committed=_watermarks,
        max_open_steps=_extents,
        layout=_text,
        sample_length_multiple=st.none() | _extents,
        heartbeat_interval_s=_seconds,
        payload_stores=st.lists(_names, max_size=3),
        prefetch_bytes=st.none() | _totals,
        max_staleness=st.none() | _counts,
    ),
    m.Push: st.integers(0, 4).flatmap(_pushes),
    m.Pushed: st.builds(
        m.Pushed,
        first_seq=_counts,
        outcomes=st.lists(st.sampled_from(Outcome), max_size=4),
        errors=st.dictionaries(_text, _text, max_size=4),
        reasons=st.dictionaries(_text, _text, max_size=4),
        staleness=st.none() | _counts,
        **_feedback,
    ),
    m.Feedback: st.builds(m.Feedback, **_feedback),
    m.Dropped: st.integers(1, 4).flatmap(_dropped),
    m.Blocked: st.builds(
        m.Blocked,
        first_seq=st.none() | _counts,
        cap=_text,
        held=_counts,
        capacity=_counts,
        waits_for=_text,
    ),
    m.CloseGroup: st.builds(
        m.CloseGroup,
        group_id=_names,
        size=st.none() | _extents,
        keep=st.none() | st.booleans(),
    ),
    m.EndPhase: st.builds(m.EndPhase, policy_version=_counts, force=st.booleans()),
    m.EndStream: st.builds(m.EndStream, force=st.booleans()),
    m.Demand: st.builds(m.Demand, taken=_watermarks, hungry=st.booleans()),
    m.PolicyVersion: st.builds(m.PolicyVersion, policy_version=_counts, first_step=_counts),
    m.StepHeader: st.builds(
        m.StepHeader,
        step=_counts,
        digest=_names,
        num_micro_batches=_extents,
        num_samples=_extents,
        tokens=_totals,
        loss_tokens=_counts,
        loss_samples=_counts,
        group_loss_tokens=st.none() | st.lists(_counts, max_size=3),
        attempt=_counts,
        num_referenced=_counts,
        fields=_fields,
    ),
    m.MicroBatch: st.integers(0, 4).flatmap(_micro_batches),
    m.Prepared: st.builds(m.Prepared, step=_counts, digest=_names, attempt=_counts),
    m.StepWithdrawn: st.builds(m.StepWithdrawn, step=_counts),
    m.Advice: st.builds(m.Advice, text=_names),
    m.Release: st.builds(m.Release, step=_counts),
    m.Finish: st.builds(m.Finish, step=_watermarks, discard=st.booleans()),
    m.LastStep: st.builds(m.LastStep, step=st.none() | _watermarks),
    m.Commit: st.builds(
        m.Commit,
        step=_counts,
        times=st.none()
        | st.lists(st.integers(1, 4).flatmap(_pass_times), min_size=1, max_size=m.MAX_PASSES),
    ),
    m.End: st.builds(m.End, reason=st.sampled_from(EndReason)),
    m.Error: st.builds(m.Error, code=_text, message=_text, retriable=st.booleans()),
    m.Ping: st.builds(m.Ping, handed_out=_counts, collectives=_counts),
    m.Pong: st.builds(m.Pong, waits_for=_text),
    m.Bye: st.builds(m.Bye),
    m.Resend: st.builds(m.Resend, first_seq=_counts),
    m.SchemaKnown: _known,
    m.CheckpointSaved: st.builds(m.CheckpointSaved, step=_watermarks),
    m.StepTimes: st.integers(1, 4).flatmap(_times),
    m.Unresolved: st.builds(
        m.Unresolved,
        step=_counts,
        attempt=_counts,
        sample_ids=st.lists(_names, min_size=1, max_size=4),
        why=_text,
    ),
    m.Free: st.builds(m.Free, number=_counts, store=_names, keys=_keys),
    m.Freed: st.builds(m.Freed, number=_counts, left=_keys, why=_text),
    m.Sweep: st.builds(m.Sweep, number=_counts, store=_names, prefix=_names),
    m.Swept: st.builds(m.Swept, number=_counts, keys=_keys, more=st.booleans(), why=_text),
}
