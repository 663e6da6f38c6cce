"""Strangers take no descriptor that the journal, a probe or a good peer needs."""

from pathlib import Path

import pytest

from rollout_dispatcher.service.connections.descriptors import RESERVE
from tests.resources.measured import descriptors
from tests.resources.strangers import strangers
from tests.service.conftest import Serve
from tests.support.client import Producer, Trainer
from tests.support.server import eventually

#: More than a process of 1,024 files can have.
CROWD = 1100
PLANES = ("sample", "http")


@pytest.mark.parametrize("limit", [1024, 256])
def test_a_run_with_a_journal_goes_on_while_strangers_hold_all_they_can(
    limit: int, serve: Serve, tmp_path: Path
) -> None:
    # Without asyncio's checks, with which it would accept too few of them.
    server = serve(open_files=limit, journal_dir=tmp_path / "journal", warm=False, checked=False)
    producer, trainer = Producer(server.endpoint, "early"), Trainer(server.endpoint, 2)
    with strangers(server.endpoint, CROWD) as crowd, strangers(server.http, CROWD):
        eventually(lambda: crowd.came > 2 * CROWD, "they come again")
        late = Producer(server.endpoint, "late")
        for _ in range(3):
            assert producer.push([3, 4]).outcomes == ["accepted"] * 2
            assert late.push([5, 6]).outcomes == ["accepted"] * 2
            assert trainer.train()
        assert [server.get(path).status for path in ("/livez", "/readyz", "/metrics")] == [200] * 3
        shown = server.scrape()
        assert all(shown[f"pending_connections{{plane={plane}}}"] > 0 for plane in PLANES)
        assert descriptors(server) <= limit - RESERVE // 2
    server.await_status(steps_committed=3, balanced=True, ranks_connected=2)
    connections = server.scrape()
    assert connections["connections_total{role=producer}"] == 2, "those who were there stayed"
    assert connections["connections_total{role=rank}"] == 2
    assert connections["connection_errors_total{reason=made-room,role=unknown}"] > CROWD
    assert connections["connection_errors_total{reason=made-room,role=http}"] > 0
    assert f"this process may open {limit} files" in server.log()
    assert "could not be accepted" not in server.log()


def test_a_dispatcher_that_could_serve_next_to_nobody_does_not_start(serve: Serve) -> None:
    with pytest.raises(AssertionError, match=r"raise the limit \(ulimit -n, LimitNOFILE=\)"):
        serve(open_files=RESERVE + 8)


def test_fewer_connections_than_ranks_are_refused_at_the_start(serve: Serve) -> None:
    with pytest.raises(AssertionError, match="200 DP ranks need as many connections, and"):
        serve(open_files=256, dp_size=200, global_batch_size=400)
