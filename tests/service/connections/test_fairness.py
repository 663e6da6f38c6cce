"""Peers that say as much as they can do not keep others waiting: real processes, orders."""

import signal
from pathlib import Path

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol.frame import STAGING_BYTES
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
