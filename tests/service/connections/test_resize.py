"""Another number of DP ranks: a new process group brings it, and open steps follow it."""

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
