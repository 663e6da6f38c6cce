"""Peers that say as much as they can do not keep others waiting: real processes, orders."""

import signal
from pathlib import Path

import pytest

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import STAGING_BYTES
from rollout_dispatcher.sample import DType
from tests.support.client import Producer, Trainer, make_push
from tests.support.server import ServeProcess, eventually

FLOODS, PUSHES = 16, 400


def one_sample(name: str, seq: int) -> bytes:
    push, payload = make_push(name, seq, [1])
    return codec.encode(push, len(payload)) + payload


def is_stopped(pid: int) -> bool:
    """A signal is on its way for a while, in which a running process goes on."""
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "T"


def test_a_quiet_producer_is_heard_after_one_read_of_each_flood(tmp_path: Path) -> None:
    """All have written by the time the dispatcher looks, the quiet one last of all.

    The first step takes the samples that were heard first.
    """
    a_read = STAGING_BYTES // len(one_sample("flood-15", 0)) + 1
    with ServeProcess(
        tmp_path,
        dp_size=1,
        global_batch_size=(FLOODS + 1) * a_read,
        window=1,
        buffer_capacity=2 * FLOODS * PUSHES,
        micro_batch_tokens=1024,
    ) as server:
        floods = [Producer(server.endpoint, f"flood-{at}") for at in range(FLOODS)]
        quiet, trainer = Producer(server.endpoint, "quiet"), Trainer(server.endpoint, dp_size=1)
        server.send_signal(signal.SIGSTOP)
        eventually(lambda: is_stopped(server.pid), "the dispatcher is stopped")
        for flood in floods:
            pushes = (one_sample(flood.client_id, seq) for seq in range(PUSHES))
            flood.send_bytes(b"".join(pushes))
        quiet.send_bytes(one_sample("quiet", 0))
        server.send_signal(signal.SIGCONT)
        (step,) = trainer.train()
        assert "quiet/0" in step.sample_ids
        assert server.scrape()["message_duration_seconds_count{role=producer}"] > 0
        assert server.scrape()["message_duration_seconds_count{role=rank}"] > 0


def test_a_held_push_waits_for_one_of_each_producer_and_not_for_all_that_they_hold(
    tmp_path: Path,
) -> None:
    with ServeProcess(
        tmp_path, dp_size=1, global_batch_size=4, window=1, micro_batch_size=4
    ) as server:
        floods = [Producer(server.endpoint, f"flood-{at}") for at in range(3)]
        for flood in floods:
            for _ in range(6):
                flood.send_push([1] * 4)
        for flood in floods:
            flood.send(m.Ping())
            while not isinstance(flood.receive()[0], m.Pong):
                pass
        quiet = Producer(server.endpoint, "quiet")
        quiet.send_push([1])
        quiet.expect(m.Blocked)
        trainer = Trainer(server.endpoint, dp_size=1)
        steps = [trainer.train()[0].sample_ids for _ in range(5)]
        assert any("quiet/0" in step for step in steps), steps


@pytest.mark.parametrize("count", [m.MAX_SAMPLES + 1, 20_000])
def test_a_push_of_too_many_samples_is_refused(tmp_path: Path, count: int) -> None:
    with ServeProcess(
        tmp_path, dp_size=1, global_batch_size=4, micro_batch_size=4, buffer_capacity=10_000
    ) as server:
        producer = Producer(server.endpoint, "p")
        push = m.Push.model_construct(
            first_seq=0,
            floor=0,
            fields=[m.FieldHeader(name="x", dtype=DType.INT8)],
            tokens=[1] * count,
            loss_tokens=[0] * count,
            sample_ids=["s"] * count,
        )
        producer.send_bytes(codec.encode(push, count))
        error = producer.expect_error("protocol")
        assert f"at most {m.MAX_SAMPLES} items" in error.message


def test_a_header_that_would_take_long_to_read_is_refused_unread(tmp_path: Path) -> None:
    with ServeProcess(tmp_path, dp_size=1, global_batch_size=4, micro_batch_size=4) as server:
        producer = Producer(server.endpoint, "p")
        push, payload = make_push("p", 0, [1], sample_ids=["s"])
        frame = codec.encode(push.model_copy(update={"sample_ids": ["s" * 2**20]}), len(payload))
        producer.send_bytes(frame[:64])
        error = producer.expect_error("frame-too-large")
        assert "exceeds the limit of 1048576 bytes" in error.message
