"""Conversations of the sample plane as vectors: every message in its place, with what it means."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.protocol import assemble, codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import FrameLimits, FrameReader
from rollout_dispatcher.protocol.sessions import Side
from rollout_dispatcher.protocol.slices import Slicing
from rollout_dispatcher.sample import DType, Field, Outcome, Sample, Schema
from rollout_dispatcher.spans import join
from tests.support.samples import span_of
from tests.support.wire.frames import feed

LIMITS = FrameLimits(1 << 20, 1 << 20)


@dataclass(frozen=True)
class Vector:
    """One frame of a conversation."""

    speaker: Side
    message: m.Message
    meaning: str
    payload: bytes = b""


SCHEMA = Schema((Field("input_ids", DType.INT64), Field("loss_mask", DType.BOOL)))


def _sample(name: str, ids: list[int], group: str | None = None) -> Sample:
    values = np.array(ids, np.int64).tobytes(), bytes([0] + [1] * (len(ids) - 1))
    span = memoryview(join(values))
    return Sample(name, len(ids), len(ids) - 1, SCHEMA, span, group, 2 if group else 1, 3)


FIRST, SECOND = _sample("p/0", [101, 7, 8], "g"), _sample("p/1", [101, 9], "g")


def _read(data: bytes) -> tuple[m.Message, bytes]:
    (frame,) = feed(FrameReader(LIMITS), data)
    return codec.decode(frame), bytes(frame.payload)


def _pushing() -> Iterator[Vector]:
    it, other = Side.PRODUCER, Side.DISPATCHER
    yield Vector(
        it,
        m.HelloProducer(client_id="p", token="secret", feedback=True),
        "a producer introduces itself",
    )
    yield Vector(
        other,
        m.WelcomeProducer(
            run_id="run",
            credits=8,
            max_payload_bytes=1 << 20,
            heartbeat_interval_s=5.0,
            max_staleness=2,
        ),
        "8 pushes are held for it while the buffer is full",
    )
    yield Vector(
        other,
        m.Feedback(policy_version=4, expected_version=5, remaining=0),
        "the trainer has version 4; what is pushed now is trained with version 5, and has to wait",
    )
    push = m.Push(
        fields=m.field_headers(SCHEMA), tokens=[3, 2], loss_tokens=[2, 1],
        sample_ids=["p/0", "p/1"], group_ids=["g", "g"], group_sizes=[2, 2],
        policy_versions=[3, 3], staleness_exempt=[False, True], first_seq=0, floor=0,
    )  # fmt: skip
    both = bytes(span_of(FIRST)) + bytes(span_of(SECOND))
    yield Vector(it, push, "two samples of 3 and 2 tokens, a group, in spans of 32 and 24", both)
    yield Vector(
        other,
        m.Blocked(first_seq=0, cap="samples", held=64, capacity=64, waits_for="DP rank 1"),
        "the buffer is full, the push is held",
    )
    yield Vector(other, m.Resend(first_seq=0), "it can come in now, and its payload was let go")
    yield Vector(it, push, "the same again, under the same numbers", both)
    yield Vector(
        other,
        m.Pushed(first_seq=0, outcomes=[Outcome.ACCEPTED], staleness=1, remaining=62),
        "both samples are accepted, and one version old; the versions are as said before",
    )
    known = m.SchemaKnown(
        fields=m.field_headers(SCHEMA),
        set_by="set by the first accepted push, from producer p",
    )
    yield Vector(other, known, "the run's first push is accepted: other fields are refused now")
    yield Vector(
        other, m.Feedback(policy_version=7, expected_version=7), "the trainer has version 7"
    )
    dropped = m.Dropped(reason="stale", sample_ids=["p/0", "p/1"], group_ids=["g", "g"])
    yield Vector(other, dropped, "both samples are too old by now, and were dropped")
    yield Vector(it, m.CloseGroup(group_id="h", keep=True, number=1), "no member of h will come")
    yield Vector(it, m.EndPhase(policy_version=4), "nothing older than version 4 will come")
    yield Vector(it, m.EndStream(), "nothing will come any more")
    yield Vector(it, m.Ping(), "was all of that heard?")
    yield Vector(other, m.Pong(), "it was")
    yield Vector(it, m.Bye(), "a deliberate goodbye")
    yield Vector(other, m.Bye(), "what was said is safe; the connection is closed")


IMAGES = Schema(
    (
        Field.text("env"),
        Field("image_grid_thw", DType.INT64, per_token=False, shape=(3,), ragged=True),
        Field("input_ids", DType.INT64),
    )
)


def _image_sample(name: str, env: str, grids: list[list[int]], ids: list[int]) -> Sample:
    text, grid = env.encode(), np.array(grids, np.int64).tobytes()
    span = memoryview(join((text, grid, np.array(ids, np.int64).tobytes())))
    rows = len(text), len(grids)
    return Sample(name, len(ids), len(ids) - 1, IMAGES, span, policy_version=3, rows=rows)


WEB, MATH = (
    _image_sample("p/0", "web", [[1, 2, 2], [1, 4, 2]], [101, 7]),
    _image_sample("p/1", "math", [], [9]),
)


def _pushing_images() -> Iterator[Vector]:
    it, other = Side.PRODUCER, Side.DISPATCHER
    hello = m.HelloProducer(client_id="p")
    yield Vector(it, hello, "a producer introduces itself")
    welcome = m.WelcomeProducer(
        run_id="run", credits=8, max_payload_bytes=1 << 20,
        heartbeat_interval_s=5.0,
    )  # fmt: skip
    yield Vector(other, welcome, "it may push")
    push = m.Push(
        fields=m.field_headers(IMAGES), tokens=[2, 1], loss_tokens=[1, 0],
        sample_ids=["p/0", "p/1"], policy_versions=[3, 3],
        rows={"env": [3, 4], "image_grid_thw": [2, 0]}, first_seq=0, floor=0,
    )  # fmt: skip
    both = bytes(span_of(WEB)) + bytes(span_of(MATH))
    meaning = "two samples, of 3 and 4 bytes of text, 2 and 0 images, in spans of 72 and 16"
    yield Vector(it, push, meaning, both)
    yield Vector(
        other, m.Pushed(first_seq=0, outcomes=[Outcome.ACCEPTED]), "both samples are accepted"
    )


def _training_images() -> Iterator[Vector]:
    it, other = Side.RANK, Side.DISPATCHER
    hello = m.HelloRank(client_id="r", dp_rank=0, dp_size=1)
    yield Vector(it, hello, "DP rank 0 of 1 introduces itself")
    welcome = m.WelcomeRank(
        run_id="run", generation=1, committed=-1, max_open_steps=4,
        layout="packed", heartbeat_interval_s=5.0,
    )  # fmt: skip
    yield Vector(other, welcome, "it has begun generation 1")
    header, _ = _read(assemble.step_header(0, "d1", 2, (WEB, MATH)))
    yield Vector(other, header, "step 0 has two micro-batches a rank")
    batch, payload = _read(b"".join(assemble.micro_batch(0, 0, (WEB, MATH))))
    meaning = "env of both samples at 0..7, image_grid_thw at 8..56, input_ids at 56..80"
    yield Vector(other, batch, meaning, payload)
    batch, payload = _read(b"".join(assemble.filler(0, 1, WEB)))
    yield Vector(other, batch, "a filler: one token, no rows, no text", payload)


def _training() -> Iterator[Vector]:
    it, other = Side.RANK, Side.DISPATCHER
    training = {"loss_normalisation": "token-mean", "layout": "packed"}

    def welcome(committed: int) -> m.WelcomeRank:
        return m.WelcomeRank(
            run_id="run", generation=1, committed=committed, max_open_steps=4,
            layout="packed", heartbeat_interval_s=5.0, max_staleness=2,
        )  # fmt: skip

    yield Vector(
        it,
        m.HelloRank(client_id="r", dp_rank=0, dp_size=1, training=training),
        "DP rank 0 of 1 asks for a generation",
    )
    yield Vector(other, welcome(-1), "it has begun generation 1 of the run; no step is committed")
    resume = m.CheckpointPosition(run_id="run", step=6)
    again = m.HelloRank(
        client_id="r", dp_rank=0, dp_size=1, generation=1, run_id="run",
        resume=resume, training=training,
    )  # fmt: skip
    yield Vector(it, again, "it has loaded a checkpoint that was taken after step 6")
    yield Vector(other, welcome(6), "its next step is 7")
    yield Vector(it, m.PolicyVersion(policy_version=3, first_step=7), "step 7 trains version 3")
    yield Vector(it, m.Demand(taken=6, hungry=True), "its training loop waits for a step")
    totals: dict[str, Any] = {"group_loss_tokens": [3], "expected_loss_tokens": 4}
    header, _ = _read(assemble.step_header(7, "d1", 1, (FIRST, SECOND), **totals))
    yield Vector(other, header, "step 7 has one micro-batch a rank, and 5 tokens in one group")
    batch, payload = _read(b"".join(assemble.micro_batch(7, 0, (FIRST, SECOND), [0, 0])))
    yield Vector(other, batch, "input_ids of both samples at 0..40, loss_mask at 40..45", payload)
    yield Vector(it, m.Prepared(step=7, digest="d1"), "it can train the step")
    yield Vector(other, m.Release(step=7), "so can every other rank: it may begin")
    yield Vector(it, m.Demand(taken=7, hungry=False), "it has begun step 7")
    meaning = "its training loop has one micro-batch of it, and has begun 12 collectives in all"
    yield Vector(it, m.Ping(handed_out=1, collectives=12), meaning)
    yield Vector(other, m.Pong(), "both are alive")
    times = m.PassTimes(busy_s=[0.5], collective_s=[0.125])
    meaning = "step 7 is applied: its micro-batch took half a second, an eighth in collectives"
    yield Vector(it, m.Commit(step=7, times=[times]), meaning)
    late = m.StepTimes(step=7, cost_key="critic", busy_s=[0.25], collective_s=[0.0])
    yield Vector(it, late, "so much is known only now: a quarter of one in another pass")
    told = m.Advice(text="no checkpoint was reported as saved so far")
    yield Vector(other, told, "its trainer should report checkpoints")
    yield Vector(it, m.CheckpointSaved(step=7), "a checkpoint taken after step 7 is durable")
    yield Vector(other, m.End(reason=EndReason.ENDED), "no step will follow")
    yield Vector(it, m.Bye(), "a deliberate goodbye")
    yield Vector(other, m.Bye(), "what was said is safe; the connection is closed")


STORE = "file:///data/rollouts"


def _pushing_references() -> Iterator[Vector]:
    it, other = Side.PRODUCER, Side.DISPATCHER
    yield Vector(
        it,
        m.HelloProducer(client_id="p", opens_stores=True),
        "a producer introduces itself",
    )
    welcome = m.WelcomeProducer(
        run_id="run", credits=8, max_payload_bytes=1 << 20,
        heartbeat_interval_s=5.0, payload_stores=[STORE], inline_limit=32,
    )  # fmt: skip
    yield Vector(other, welcome, "spans of 32 bytes and more are to be put into the store")
    push = m.Push(
        fields=m.field_headers(SCHEMA), tokens=[3, 2], loss_tokens=[2, 1],
        sample_ids=["p/0", "p/1"], first_seq=0, floor=0,
        objects=[m.ObjectHeader(store=STORE, key="p.1/0", nbytes=32)], places=[(0, 0), None],
    )  # fmt: skip
    meaning = "the span of the first sample lies in the store, that of the second is here"
    yield Vector(it, push, meaning, bytes(span_of(SECOND)))
    yield Vector(other, m.Pushed(first_seq=0, outcomes=[Outcome.ACCEPTED]), "both are accepted")
    yield Vector(
        other, m.Free(number=0, store=STORE, keys=["p.1/0"]), "the step is committed: free it"
    )
    yield Vector(it, m.Freed(number=0), "it is gone")
    sweep = m.Sweep(number=1, store=STORE, prefix="q.4/")
    yield Vector(other, sweep, "another producer has ended: what is left of it?")
    yield Vector(it, m.Swept(number=1, keys=["q.4/7"]), "an object that was never pushed")


def _training_on_references() -> Iterator[Vector]:
    it, other = Side.RANK, Side.DISPATCHER
    hello = m.HelloRank(client_id="r", dp_rank=0, dp_size=1, opens_stores=True, generation=1)
    yield Vector(it, hello, "a DP rank introduces itself")
    welcome = m.WelcomeRank(
        run_id="run", generation=1, committed=-1, max_open_steps=4,
        layout="packed", heartbeat_interval_s=5.0, payload_stores=[STORE],
    )  # fmt: skip
    yield Vector(other, welcome, "it may fetch from this store, and from no other")
    header = m.StepHeader(
        step=0, digest="6d1f", num_micro_batches=1, num_samples=2, tokens=5, loss_tokens=3,
        loss_samples=2, fields=m.field_headers(SCHEMA), num_referenced=1,
    )  # fmt: skip
    yield Vector(other, header, "of step 0 a sample lies in a store")
    both = m.MicroBatch(
        step=0, index=0, tokens=[3, 2], loss_tokens=[2, 1], sample_ids=["p/0", "p/1"],
        objects=[m.ObjectHeader(store=STORE, key="p.1/0", nbytes=32)], places=[(0, 0), None],
    )  # fmt: skip
    ids, mask = np.array([101, 9], np.int64).tobytes(), bytes([0, 1, 0, 0, 0, 0, 0, 0])
    yield Vector(other, both, "the first lies there; the payload has the second alone", ids + mask)
    lost = m.Unresolved(step=0, attempt=0, sample_ids=["p/0"], why="no such object")
    yield Vector(it, lost, "it is gone")
    again = header.model_copy(
        update={"digest": "0c55", "attempt": 1, "num_samples": 1, "tokens": 2, "loss_tokens": 1,
                "loss_samples": 1, "num_referenced": 0}
    )  # fmt: skip
    yield Vector(other, again, "the step is planned anew without it")
    rest = m.MicroBatch(step=0, index=0, tokens=[2], loss_tokens=[1], sample_ids=["p/1"], attempt=1)
    yield Vector(other, rest, "what is left", ids + mask)
    yield Vector(it, m.Prepared(step=0, digest="0c55", attempt=1), "it holds the new attempt")
    second = header.model_copy(update={"step": 1, "digest": "9f20"})
    yield Vector(other, second, "of step 1 a sample lies there, too")
    gone = m.Unresolved(step=1, attempt=0, sample_ids=["p/2"], why="no such object")
    yield Vector(it, gone, "which is gone")
    yield Vector(other, m.StepWithdrawn(step=1), "nothing is left of the step: it is none")


def _left_alone() -> Iterator[Vector]:
    it, other = Side.RANK, Side.DISPATCHER
    hello = m.HelloRank(client_id="r", dp_rank=0, dp_size=2, generation=1, taken=7, committed=7)
    yield Vector(it, hello, "it has trained step 7")
    welcome = m.WelcomeRank(
        run_id="run", generation=1, committed=7, max_open_steps=4, layout="packed",
        heartbeat_interval_s=5.0,
    )  # fmt: skip
    yield Vector(other, welcome, "its place is as before")
    yield Vector(other, m.LastStep(step=7), "DP rank 1 has closed its stream after step 7")
    yield Vector(it, m.Demand(taken=7, hungry=True), "its training loop waits for another step")
    text = "DP rank 1 closed its stream after step 7, and others go on"
    yield Vector(other, m.Error(code="peer-lost", message=text), "there is none without that rank")


def _finishing(*, again: bool) -> Iterator[Vector]:
    it, other = Side.RANK, Side.DISPATCHER
    hello = m.HelloRank(
        client_id="r", dp_rank=0, dp_size=1, generation=1, taken=7, committed=7,
        finished=7 if again else None,
    )  # fmt: skip
    yield Vector(it, hello, "it has trained step 7" + (", and has had enough" if again else ""))
    welcome = m.WelcomeRank(
        run_id="run", generation=1, committed=7, max_open_steps=4, layout="packed",
        heartbeat_interval_s=5.0,
    )  # fmt: skip
    yield Vector(other, welcome, "its place is as before")
    if not again:
        yield Vector(it, m.Finish(step=7), "it has had enough")
    yield Vector(other, m.End(reason=EndReason.FINISHED), "so have all other ranks")
    yield Vector(it, m.Bye(), "a deliberate goodbye")
    yield Vector(other, m.Bye(), "what was said is safe; the connection is closed")


def _waiting() -> Iterator[Vector]:
    it, other = Side.RANK, Side.DISPATCHER
    yield Vector(it, m.HelloRank(client_id="r", dp_rank=0, dp_size=1), "a DP rank")
    welcome = m.WelcomeRank(
        run_id="run", generation=1, committed=-1, max_open_steps=4, layout="packed",
        heartbeat_interval_s=5.0,
    )  # fmt: skip
    yield Vector(other, welcome, "it has its place")
    yield Vector(it, m.Demand(taken=-1, hungry=True), "its training loop waits for a step")
    yield Vector(it, m.Ping(), "what for?")
    yield Vector(other, m.Pong(waits_for="0 of 4 samples are ready"), "for samples")


def _refusal() -> Iterator[Vector]:
    hello = m.HelloRank(client_id="r", dp_rank=2, dp_size=2, generation=1)
    yield Vector(Side.RANK, hello, "there is no DP rank 2 of 2")
    text = "DP rank 2 is out of range, ranks are 0 to 1"
    error = m.Error(code="rank-refused", message=text)
    yield Vector(Side.DISPATCHER, error, "it may not join; the connection is closed")


def _pushing_again() -> Iterator[Vector]:
    it, other = Side.PRODUCER, Side.DISPATCHER
    hello = m.HelloProducer(
        client_id="p", version=3, opens_stores=True, feedback=True, key="0123456789abcdef",
        incarnation="p.2", accepted=1,
    )  # fmt: skip
    yield Vector(it, hello, "a producer comes back, with the key that makes its name its own")
    welcome = m.WelcomeProducer(
        run_id="run", credits=8, max_payload_bytes=1 << 20,
        heartbeat_interval_s=5.0, payload_stores=[STORE],
        schema_known=m.SchemaKnown(fields=m.field_headers(SCHEMA), set_by="set by --field"),
    )  # fmt: skip
    yield Vector(other, welcome, "every sample of the run has these fields")
    push = m.Push(
        fields=m.field_headers(SCHEMA), tokens=[3, 2], loss_tokens=[2, 1],
        sample_ids=["a", "b"], named=True, checksums=[2_914_070_273, 17], first_seq=2,
        floor=2,
    )  # fmt: skip
    both = bytes(span_of(FIRST)) + bytes(span_of(SECOND))
    yield Vector(it, push, "the user has named both samples", both)
    answer = m.Pushed(
        first_seq=2, outcomes=[Outcome.DUPLICATE, Outcome.REFUSED],
        errors={"1": "sample b has 2 tokens, at most 1 is allowed"}, reasons={"1": "too-long"},
        policy_version=4, expected_version=5,
    )  # fmt: skip
    yield Vector(other, answer, "the first is here already, the second will never be taken")
    gone = m.CloseGroup(group_id="g", size=2, number=2, withdrawn=[2, 3])
    yield Vector(it, gone, "two members of g, which was to have 2, will not come")
    yield Vector(it, m.CloseGroup(group_id="h", number=3), "nor will any of h")
    told = m.Advice(text="group h is not known, so closing it changes nothing")
    yield Vector(other, told, "it has misspelt the name")
    yield Vector(it, m.EndPhase(policy_version=5, force=True), "nor will anybody else's older ones")
    yield Vector(it, m.EndStream(force=True), "nor anything of anybody")
    yield Vector(other, m.Free(number=3, store=STORE, keys=["p.1/0", "p.1/1"]), "free these")
    left = m.Freed(number=3, left=["p.1/1"], why="the store is away")
    yield Vector(it, left, "the second is still there")
    yield Vector(other, m.Sweep(number=4, store=STORE, prefix="q.4/"), "what is left of q?")
    some = m.Swept(number=4, keys=["q.4/0"], more=True, why="there are 1,000 of them")
    yield Vector(it, some, "one of many")
    late = m.Error(code="stopping", message="the dispatcher is stopping", retriable=True)
    yield Vector(other, late, "the connection is closed; it may come again")


def _training_again() -> Iterator[Vector]:
    it, other = Side.RANK, Side.DISPATCHER
    hello = m.HelloRank(
        client_id="r", version=3, opens_stores=True, token="secret", dp_rank=0, dp_size=1,
        generation=1, run_id="run", prefetch_steps=2, taken=7, committed=6, hungry=True,
        received=[(8, 1)], attempts=[(8, 1)], policy_version=3, policy_step=7, saved=5,
        packed_length=4096,
    )  # fmt: skip
    yield Vector(it, hello, "DP rank 0 comes back: it trains step 7, and holds a part of step 8")
    welcome = m.WelcomeRank(
        run_id="run", generation=1, committed=6, max_open_steps=4,
        layout="packed", heartbeat_interval_s=5.0, sample_length_multiple=8,
        payload_stores=[STORE], prefetch_bytes=1 << 20,
    )  # fmt: skip
    yield Vector(other, welcome, "it goes on after step 6")
    times = m.StepTimes(step=7, busy_s=[0.5], collective_s=[0.0], why="no events")
    yield Vector(it, times, "of which it is not sure")
    yield Vector(it, m.Ping(), "is anybody there?")
    yield Vector(other, m.Pong(), "yes")
    yield Vector(other, m.Free(number=0, store=STORE, keys=["p.1/0"]), "free this")
    yield Vector(it, m.Freed(number=0), "it is gone")
    yield Vector(other, m.Sweep(number=1, store=STORE, prefix="q.4/"), "what is left of q?")
    yield Vector(it, m.Swept(number=1), "nothing")


def _training_together() -> Iterator[Vector]:
    it, other = Side.RANK, Side.DISPATCHER
    hello = m.HelloRank(
        client_id="r", dp_rank=1, dp_size=2, generation=1, max_split=2, slicing=Slicing.ZIGZAG
    )
    yield Vector(it, hello, "DP rank 1 may train a sample together with rank 0")
    welcome = m.WelcomeRank(
        run_id="run", generation=1, committed=-1, max_open_steps=4,
        layout="packed", heartbeat_interval_s=5.0,
    )  # fmt: skip
    yield Vector(other, welcome, "so it is welcome where some are planned for two")
    header = m.StepHeader(
        step=0, digest="6d1f", num_micro_batches=1, num_samples=1, tokens=4, loss_tokens=1,
        loss_samples=1, fields=m.field_headers(SCHEMA),
    )  # fmt: skip
    yield Vector(other, header, "step 0 has one sample in all")
    slices = m.MicroBatch(
        step=0, index=0, tokens=[4], loss_tokens=[1], sample_ids=["p/0"], cp_size=2, cp_rank=1,
        ranges=[[(1, 4)]],
    )  # fmt: skip
    ids, mask = np.array([7, 8, 9], np.int64).tobytes(), bytes([0, 0, 1, 0, 0, 0, 0, 0])
    meaning = "its tokens 1 to 3: this rank trains 1 and 2, rank 0, on which it counts, 0 and 3"
    yield Vector(other, slices, meaning, ids + mask)


CONVERSATIONS = {
    "A producer pushes": tuple(_pushing()),
    "A DP rank trains": tuple(_training()),
    "A DP rank is refused": tuple(_refusal()),
    "A DP rank is left alone": tuple(_left_alone()),
    "A DP rank finishes the run": tuple(_finishing(again=False)),
    "A DP rank that has finished comes back": tuple(_finishing(again=True)),
    "A DP rank asks what it waits for": tuple(_waiting()),
    "A producer pushes images and text": tuple(_pushing_images()),
    "A DP rank trains on images and text": tuple(_training_images()),
    "A producer pushes references": tuple(_pushing_references()),
    "A DP rank trains on references": tuple(_training_on_references()),
    "A producer comes back": tuple(_pushing_again()),
    "A DP rank comes back": tuple(_training_again()),
    "A DP rank trains together with another": tuple(_training_together()),
}
