"""Ends that are decided while pushes are held back, which come in only once a step is planned for.

Real processes, real sockets: nobody says anything that would have the dispatcher look again.
"""

import pytest

from rollout_dispatcher.protocol import messages as m
from tests.service.conftest import Serve
from tests.support.client import Producer, Rank, make_span


def test_the_stream_ends_when_its_last_held_push_comes_in_for_a_group_that_is_given_up(
    serve: Serve,
) -> None:
    """Beginnings of groups fill the memory, and a push is held back when all end their streams."""
    server = serve(
        dp_size=1, buffer_bytes=f"{2 * len(make_span(0, 16))}B", max_wait="300ms", group_size=2
    )
    with Rank(server.endpoint, 0, 1) as rank:
        rank.demand(taken=-1)
        first, second = Producer(server.endpoint, "a"), Producer(server.endpoint, "b")
        assert first.push([16, 16], group_ids=["g", "h"]).outcomes == ["accepted", "accepted"]
        second.send_push([16], group_ids=["i"])
        second.expect(m.Blocked)
        first.end_stream()
        second.end_stream()
        assert second.expect(m.Pushed).of_each(1) == ["accepted"]
        assert rank.await_end() == "ended"
    server.await_status(run_state="drained", pushes_held=0, balanced=True)


@pytest.mark.parametrize("why", ["oversize", "staleness"])
def test_a_forced_phase_ends_when_its_last_held_push_comes_in_for_what_is_dropped(
    serve: Serve, why: str
) -> None:
    """What fills the buffer is dropped when the rank, which prefetches nothing, asks for a step."""
    options = {"on_oversize": "drop"} if why == "oversize" else {"max_staleness": 0}
    server = serve(dp_size=1, micro_batch_tokens=16, max_wait="300ms", **options)
    producer = Producer(server.endpoint, "p")
    with Rank(server.endpoint, 0, 1, prefetch_steps=0) as rank:
        rank.demand(taken=-1)
        producer.push([8] * 4, policy_versions=[0] * 4)
        rank.hold(0)
        rank.prepare(0)
        rank.await_release(0)
        rank.demand(taken=0, hungry=False)
        tokens, newer = (40, 0) if why == "oversize" else (8, 1)
        producer.push([tokens] * 4, policy_versions=[0] * 4)
        producer.send_push([8] * 2, policy_versions=[newer] * 2)
        producer.expect(m.Blocked)
        assert server.post(f"/v1/phases/{newer + 1}/end?force=true").status == 200
        rank.send(m.PolicyVersion(policy_version=newer, first_step=1))
        rank.commit(0)
        rank.demand(taken=0)
        assert producer.expect(m.Pushed).of_each(2) == ["accepted"] * 2
        assert rank.hold(1).sample_ids == ["p/8", "p/9"]
    server.await_status(run_state="running", pushes_held=0, balanced=True)
