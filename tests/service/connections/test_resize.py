"""Another number of DP ranks: a new process group brings it, and open steps follow it."""

import signal
import socket
from pathlib import Path

import pytest

from rollout_dispatcher.protocol import messages as m
from tests.service.conftest import Serve
from tests.support.client import HeldStep, Producer, Rank, Trainer, WireClient
from tests.support.server import ServeProcess


def names(parts: list[HeldStep]) -> list[str]:
    return sorted(name for part in parts for name in part.sample_ids)


def refusal(server: ServeProcess, dp_rank: int, dp_size: int, generation: int | None) -> str:
    """Why such a rank may not join."""
    with WireClient(server.endpoint) as client:
        hello = m.HelloRank(client_id="x", dp_rank=dp_rank, dp_size=dp_size, generation=generation)
        client.send(hello)
        return client.expect_error("rank-refused").message


def per_rank(server: ServeProcess, metric: str) -> list[str]:
    """Labels of the series of a metric that has one a rank."""
    return sorted(series for series in server.scrape() if series.startswith(f"{metric}{{"))


def test_the_ranks_of_a_mesh_are_not_taken_for_data_parallel_ones(serve: Serve) -> None:
    server = serve()
    words = refusal(server, 0, 4, None)
    assert "this dispatcher was started with --dp-size 2" in words
    assert "pass dp_rank= and dp_size= of its data-parallel dimension" in words
    with Trainer(server.endpoint, 2):
        server.await_status(generation=1, dp_size=2, ranks_connected=2)
    with Trainer(server.endpoint, 4):
        server.await_status(generation=2, dp_size=4, ranks_connected=4)


def test_a_larger_group_gets_the_open_step_again_and_a_smaller_one_goes_on(serve: Serve) -> None:
    server = serve(micro_batch_size=1)
    producer = Producer(server.endpoint, "p")
    producer.push([3, 9, 4, 7])
    old = Trainer(server.endpoint, 2)
    before = old.take()
    old.ranks[0].commit(0)
    old.ranks[0].settle()

    new = Trainer(server.endpoint, 4)
    for rank in old.ranks:
        assert "a newer process group took over" in rank.expect_error("fenced").message
    again = new.take()
    assert [part.header.num_micro_batches for part in before + again] == [2, 2, 1, 1, 1, 1]
    assert names(again) == names(before)
    assert {part.header.step for part in again} == {0}
    assert {part.header.digest for part in again} != {part.header.digest for part in before}
    at = server.scrape()
    assert (at["dp_size"], at["redeliveries_total{reason=new-size}"]) == (4, 1)
    assert at["steps_committed_total"] == 0  # what the old rank 0 said is void
    new.commit(0)
    server.await_status(steps_committed=1, balanced=True, dp_size=4, ranks_connected=4)
    producer.push([3] * 4)
    new.train()
    server.await_status(steps_committed=2)
    assert len(per_rank(server, "rank_dispatched_cost_total")) == 4

    last = Trainer(server.endpoint, 1)
    producer.push([3] * 4)
    assert [part.header.num_micro_batches for part in last.train()] == [4]
    server.await_status(steps_committed=3, balanced=True, dp_size=1, ranks_connected=1)
    for metric in ("rank_dispatched_cost_total", "rank_last_seen_timestamp_seconds"):
        assert per_rank(server, metric) == [f"{metric}{{dp_rank=0}}"]


def test_ranks_that_are_no_more_are_not_absent(serve: Serve) -> None:
    server = serve()
    Rank(server.endpoint, 0, 2)
    with Trainer(server.endpoint, 3):
        server.await_status(ranks_connected=3)
    server.await_status(absent_ranks=[0, 1, 2])
    with Trainer(server.endpoint, 2):
        server.await_status(absent_ranks=[], ranks_connected=2)
        assert "absent" not in server.get("/readyz").text


def test_a_size_that_the_batch_does_not_divide_over_is_refused_and_training_goes_on(
    serve: Serve,
) -> None:
    server = serve(global_batch_size=8, micro_batch_size=2)
    trainer = Trainer(server.endpoint, 2)
    words = (
        "no steps for 3 DP ranks: global_batch_size 8 is not a multiple of 6 = dp_size 3 x "
        "micro_batch_size 2; use 6 or 12, or dp_size 2 or 4"
    )
    assert refusal(server, 0, 3, None) == words
    Producer(server.endpoint, "p").push([3] * 8)
    assert len(trainer.train()) == 2
    server.await_status(steps_committed=1, generation=1, dp_size=2)


def test_more_ranks_than_connections_are_refused(serve: Serve) -> None:
    server = serve(max_connections=8)
    Rank(server.endpoint, 0, 2)
    assert "--set max-connections is 8; raise it" in refusal(server, 0, 2**31 - 1, None)


def test_the_number_may_be_fixed(serve: Serve) -> None:
    server = serve(allow_dp_resize=False)
    with Trainer(server.endpoint, 2):
        server.await_status(ranks_connected=2)
    words = "this dispatcher serves 2; start it with --dp-size 4, or with --set allow-dp-resize=on"
    assert words in refusal(server, 0, 4, None)
    with Trainer(server.endpoint, 2):
        server.await_status(generation=2, ranks_connected=2)


@pytest.mark.parametrize("planned_again", [False, True], ids=["before", "after"])
def test_the_size_and_the_new_plans_outlive_a_kill(
    planned_again: bool, serve: Serve, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    options = {"listen": address, "journal_dir": tmp_path / "journal", "micro_batch_size": 1}
    server = serve(**options)
    Producer(server.endpoint, "p").push([3, 9, 4, 7])
    old = Trainer(server.endpoint, 2)
    before = old.take()
    leader = Rank(server.endpoint, 0, 4)
    if planned_again:
        leader.hold(0)
    server.send_signal(signal.SIGKILL)
    server.wait()

    server = serve(**options)
    assert server.status()["dp_size"] == 4
    with WireClient(server.endpoint) as late:
        late.send(m.HelloRank(client_id="x", dp_rank=0, dp_size=2, generation=old.generation))
        assert "is over" in late.expect_error("fenced").message
    ranks = [leader.reconnect()]
    ranks += [Rank(server.endpoint, at, 4, generation=leader.generation) for at in (1, 2, 3)]
    parts = [rank.hold(0) for rank in ranks]  # the leader fails if its plan is not the same
    assert names(parts) == names(before)
    for rank in ranks:
        rank.demand(taken=-1)
        rank.prepare(0)
    for rank in ranks:
        rank.await_release(0)
        rank.commit(0)
    server.await_status(steps_committed=1, samples_committed=4, balanced=True)
